"""Reads the names of expert tensors, which come from downloaded files.

Does not know which layers of a family are sparse: that is a table the family hands in.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from moeinf.models.base import ExpertPart, ModelDataError, Role

_INDEX = "(0|[1-9][0-9]{0,8})"


def expert_pattern(template: str, roles: Mapping[str, Role]) -> re.Pattern[str]:
    """Compiles a literal template with {layer}, {expert} and {role} in this order."""
    text = re.escape(template)
    words = {"layer": _INDEX, "expert": _INDEX, "role": f"({'|'.join(map(re.escape, roles))})"}
    for word, group in words.items():
        text = text.replace(re.escape(f"{{{word}}}"), group)
    return re.compile(text)


def expert_part(
    name: str,
    pattern: re.Pattern[str],
    roles: Mapping[str, Role],
    sparse_layers: Sequence[int],
    experts: int,
) -> ExpertPart | None:
    """The part that `name` is, or None when it is not an expert's.

    sparse_layers: the checkpoint's numbers of the MoE layers, in order. Raises ModelDataError for
    a number out of range and for expert tensors stored in another form.
    """
    match = pattern.fullmatch(name)
    if match is None:
        if ".experts." in name:
            raise ModelDataError(
                f"{name[:200]!r} is not the way this family stores an expert; "
                "only per-expert tensors that are not quantised are supported"
            )
        return None
    layer, expert = int(match[1]), int(match[2])
    if layer not in sparse_layers or expert >= experts:
        raise ModelDataError(f"{name!r}: the config has no expert {expert} in layer {layer}")
    return ExpertPart(sparse_layers.index(layer), expert, roles[match[3]])
