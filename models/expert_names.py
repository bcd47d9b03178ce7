"""Read the names of expert tensors, which come from downloaded files.

The family passes in the numbers of its sparse layers.
"""

from __future__ import annotations

import re
from collections.abc import Container, Mapping, Sequence

from moeinf.models.base import ExpertPart, ModelDataError, Role

_INDEX = "(0|[1-9][0-9]{0,8})"
_LAYER = re.compile(r"model\.layers\.(\d{1,9})\.")


class ExpertNames:
    """The names that a family gives the tensors of its experts."""

    def __init__(self, template: str, roles: Mapping[str, Role]) -> None:
        """Take a template: literal text with {layer}, {expert} and {role} in this order."""
        text = re.escape(template)
        words = {"layer": _INDEX, "expert": _INDEX, "role": f"({'|'.join(map(re.escape, roles))})"}
        for word, group in words.items():
            text = text.replace(re.escape(f"{{{word}}}"), group)
        self._pattern = re.compile(text)
        self._roles = roles

    def part(self, name: str, sparse_layers: Sequence[int], experts: int) -> ExpertPart | None:
        """Return the part that `name` is, or None when it is not an expert's.

        sparse_layers: the checkpoint's numbers of the MoE layers, in order. Raises ModelDataError
        for a number out of range and for expert tensors stored in another form.
        """
        match = self._pattern.fullmatch(name)
        if match is None:
            if ".experts." in name:
                raise ModelDataError(
                    f"{name[:200]!r} is not the way this family stores an expert; "
                    "only one tensor per expert and matrix is supported"
                )
            return None
        layer, expert = int(match[1]), int(match[2])
        if layer not in sparse_layers or expert >= experts:
            raise ModelDataError(f"{name!r}: the config has no expert {expert} in layer {layer}")
        return ExpertPart(sparse_layers.index(layer), expert, self._roles[match[3]])


MLP_EXPERTS = ExpertNames(
    "model.layers.{layer}.mlp.experts.{expert}.{role}.weight",
    {"gate_proj": "gate", "up_proj": "up", "down_proj": "down"},
)
BLOCK_SPARSE_EXPERTS = ExpertNames(
    "model.layers.{layer}.block_sparse_moe.experts.{expert}.{role}.weight",
    {"w1": "gate", "w3": "up", "w2": "down"},
)


def known_layer(name: str, number: str, layers: int) -> int:
    """Return the layer of the tensor `name`, which holds all the layer's experts.

    Raises ModelDataError for a layer that the config does not have.
    """
    if int(number) >= layers:
        raise ModelDataError(f"{name!r}: the config has no layer {number}")
    return int(number)


def is_layer(name: str, layers: Container[int]) -> bool:
    """Return whether a tensor belongs to one of these layers."""
    match = _LAYER.match(name)
    return match is not None and int(match[1]) in layers
