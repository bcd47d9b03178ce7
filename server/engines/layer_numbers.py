"""Find which layer of the model each MoE layer of its store is."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from moeinf.models.base import Model
from moeinf.models.families import family_of
from moeinf.models.layers.decoder import Decoder
from moeinf.models.layers.moe import SparseFfn
from moeinf.models.nemotron_h import NemotronHConfig
from moeinf.runtime.checkpoints.checkpoint import CONFIG, read_json
from moeinf.runtime.engine.engine import Engine

_DEEPEST = 4  # a block's part of a part


def layer_numbers(engine: Engine) -> list[int]:
    """Return the number of the layer with each row of experts, [L], in its own stack.

    An encoder's layers come first and are counted apart from the decoder's. A row whose layer is
    not found has the row's own number.
    """
    manifest = engine.info.manifest
    rows = list(range(manifest.layers))
    values = read_json(engine.info.folder / CONFIG)
    config = family_of(values).parse(values)
    if manifest.encoder_layers:
        return [*config.sparse["encoder"], *config.sparse["decoder"]]
    if isinstance(config, NemotronHConfig):  # a block may be two layers
        return list(config.layers("moe"))
    for number, block in enumerate(_blocks(engine.model)):
        for part in _parts(block, _DEEPEST):
            if isinstance(part, SparseFfn) and part.layer < len(rows):
                rows[part.layer] = number
    return rows


def _blocks(model: Model) -> list[Any]:
    return list(model.body.blocks) if isinstance(model, Decoder) else []


def _parts(thing: Any, deep: int) -> Iterator[Any]:
    yield thing
    if deep and not isinstance(thing, SparseFfn):
        for part in getattr(thing, "__dict__", {}).values():
            yield from _parts(part, deep - 1)
