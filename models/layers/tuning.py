"""Let the loader tune the parts of a decoder's blocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any, cast

from moeinf.models.base import Parts
from moeinf.models.layers.half_blocks import MixerBlock
from moeinf.models.layers.moe import Router, SparseFfn
from moeinf.models.layers.routing import HashRouter

if TYPE_CHECKING:
    from moeinf.models.layers.decoder import Layer


def _sparse(block: Layer) -> SparseFfn | None:
    """Return the block's experts; None: it has none."""
    ffn = None if isinstance(block, MixerBlock) else block.ffn
    return ffn if isinstance(ffn, SparseFfn) else None


def _with(block: Layer, ffn: SparseFfn) -> Layer:
    assert not isinstance(block, MixerBlock)
    return replace(block, ffn=ffn)


def _tuned(block: Layer, parts: Parts) -> Layer:
    """Return the block with its norms and its router tuned by the loader."""
    names = [field.name for field in fields(block) if field.name.endswith("_norm")]
    block = replace(block, **{name: parts.tuned(getattr(block, name)) for name in names})
    sparse = _sparse(block)
    if sparse is None:
        return block
    return _with(block, replace(sparse, router=parts.tuned(sparse.router)))


def _looking_ahead(blocks: Sequence[Layer]) -> tuple[Layer, ...]:
    """Give every MoE layer the router of the next one, so that it can hint."""
    linked: list[Layer] = []
    router: Router | HashRouter | None = None
    for block in reversed(blocks):
        sparse = _sparse(block)
        if sparse is not None:
            following, router = router, sparse.router
            block = _with(block, replace(sparse, ahead=following))
        linked.append(block)
    return tuple(reversed(linked))


def tuned_blocks(blocks: Sequence[Layer], parts: Parts) -> tuple[Layer, ...]:
    """Let the loader tune the parts of blocks, then MoE layers, blocks, and the tuple of blocks.

    Hints keep routers.
    """
    linked = _looking_ahead([_tuned(block, parts) for block in blocks])
    tuned = [
        block if (sparse := _sparse(block)) is None else _with(block, parts.tuned(sparse))
        for block in linked
    ]
    together: Any = tuple(parts.tuned(block) for block in tuned)  # not callable, as other pieces
    return cast("tuple[Layer, ...]", parts.tuned(together))
