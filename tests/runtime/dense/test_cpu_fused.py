"""Native operations against their torch versions, on random weights of many shapes."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from moeinf.models.base import KvForm
from moeinf.models.layers.attention import (
    GqaCore,
    GqaShape,
    InterleavedRopeCore,
    NormAfterRopeCore,
    NoRopeCore,
)
from moeinf.models.layers.ffn import SigmoidGate
from moeinf.models.layers.kv_cache import CacheLayout, KvCache, PassRows, Span
from moeinf.models.layers.mla import MlaCore, MlaShape
from moeinf.models.layers.moe import Router
from moeinf.models.layers.norms import HeadNorm, RmsNorm, WideRmsNorm
from moeinf.models.layers.routing import (
    BiasedSoftmaxRouter,
    SigmoidRouter,
    SoftmaxRouter,
    SparseMixer,
    SqrtSoftplusRouter,
    TopSoftmaxRouter,
)
from moeinf.native import compute_threads, set_compute_threads
from moeinf.offload.store.compute import MOST_ROWS
from moeinf.runtime.dense.cpu_fused import NativeGqa, NativeMla, NativeNorm, NativeRouter, tuned
from moeinf.runtime.dense.cpu_mlp import NativeGate

BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def few_threads() -> Iterator[None]:
    before, torchs = compute_threads(), torch.get_num_threads()
    set_compute_threads(2)
    torch.set_num_threads(1)
    yield
    set_compute_threads(before)
    torch.set_num_threads(torchs)


class Draw:
    """Random bfloat16 tensors, reproducible from a seed."""

    def __init__(self, seed: int = 0) -> None:
        self._generator = torch.Generator().manual_seed(seed)

    def __call__(self, *shape: int, about: float = 0.0) -> Tensor:
        return (about + torch.randn(*shape, generator=self._generator)).to(BF16)


def gqa(form: KvForm = "full", **changes: object) -> tuple[GqaCore, CacheLayout, list[int]]:
    """Return a core, its cache layout and the widths of its inputs."""
    settings: dict[str, object] = {"heads": 6, "kv_heads": 2, "head_dim": 32, **changes}
    shape, draw = GqaShape(**settings), Draw(3)  # type: ignore[arg-type]
    wide, narrow = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    norms = [RmsNorm(draw(width, about=1.0), 1e-5) for width in (wide, narrow)]
    sinks = torch.linspace(-1, 2, shape.heads) if shape.window == 9 else None
    core = GqaCore(1, shape, *norms, sinks)
    layout = CacheLayout(2, shape.planes, BF16, torch.device("cpu"), form=form)
    return core, layout, [wide, narrow, shape.kv_heads * shape.value_width]


def mla(form: KvForm = "full") -> tuple[MlaCore, CacheLayout, list[int]]:
    shape, draw = MlaShape(5, 24, 8, 20, 40, None, scale=0.17), Draw(3)
    core = MlaCore(1, shape, RmsNorm(draw(40, about=1.0), 1e-6), draw(5, 44, 40) / 6)
    layout = CacheLayout(2, ((1, 48),), BF16, torch.device("cpu"), form=form)
    return core, layout, [5 * 32, 48]


def rows_of(counts: list[int], caches: list[KvCache], rope: int) -> PassRows:
    spans, start, at = [], 0, []
    for count, cache in zip(counts, caches, strict=True):
        spans.append(Span(cache, slice(start, start + count), cache.length))
        at += range(cache.length, cache.length + count)
        start += count
    angles = torch.tensor(at)[:, None] / 10 ** torch.linspace(0, 3, rope // 2)
    return PassRows(tuple(spans), torch.tensor(at), angles.cos(), angles.sin())


def play(
    core: Callable[..., Tensor], made: tuple[object, CacheLayout, list[int]], rope: int = 0
) -> list[Tensor]:
    """Run three requests: prompts, a token for all, for two, and a prompt beside a token."""
    _, layout, widths = made
    rope = rope or (layout.planes[0][1] if len(layout.planes) == 2 else 8)
    caches = [KvCache(layout, 200) for _ in range(3)]
    draw, outs = Draw(9), []
    for step in ([70, 1, 5], [1, 1, 1], [1, 1, 1], [1, 0, 1], [1, 9, 1], [1, 1, 1]):
        counts = [count for count in step if count]
        used = [cache for count, cache in zip(step, caches, strict=True) if count]
        inputs = [draw(sum(counts), width) for width in widths]
        outs.append(core(*inputs, rows_of(counts, used, rope)))
        for count, cache in zip(counts, used, strict=True):
            cache.advance(count)
    return outs


Made = tuple[Callable[..., Tensor], CacheLayout, list[int]]
CASES: dict[str, Callable[[], Made]] = {
    "gqa": gqa,
    "one query head a key head": lambda: gqa(heads=4, kv_heads=4),
    "clipped": lambda: gqa(clip=0.9),
    "window": lambda: gqa(window=40),
    "odd sizes": lambda: gqa(heads=3, kv_heads=1, head_dim=10),
    "narrow values": lambda: gqa(value_dim=24, window=9),
    "wide values": lambda: gqa(value_dim=40),
    "mla": mla,
}
Q8_CASES: dict[str, Callable[[], Made]] = {
    "q8": lambda: gqa("q8"),
    "q8, one query head a key head": lambda: gqa("q8", heads=4, kv_heads=4, head_dim=64),
    "q8, window and sinks": lambda: gqa("q8", window=9),
    "q8, odd sizes": lambda: gqa("q8", heads=3, kv_heads=1, head_dim=10),
    "q8, narrow values": lambda: gqa("q8", value_dim=24, window=9),
    "q8, mla": lambda: mla("q8"),
}


@pytest.mark.parametrize("name", [*CASES, *Q8_CASES])
def test_attention_like_torch(name: str) -> None:
    made = (CASES | Q8_CASES)[name]()
    core = tuned(made[0])
    assert isinstance(core, NativeGqa | NativeMla)
    for native, plain in zip(play(core, made), play(made[0], made), strict=True):
        wrong = (native.float() - plain.float()).abs()
        assert float(wrong.max()) <= 0.02 * max(1.0, float(plain.float().abs().max()))
        assert float(wrong.mean()) < 3e-3


@pytest.mark.parametrize("form", ["full", "q8"])
def test_partial_rotary(form: KvForm) -> None:
    made = gqa(form, head_dim=64)
    core = tuned(made[0])
    for native, plain in zip(play(core, made, 16), play(made[0], made, 16), strict=True):
        torch.testing.assert_close(native, plain, rtol=0.02, atol=0.02)
    assert not torch.equal(play(core, made, 16)[1], play(made[0], made, 16)[1])


@pytest.mark.parametrize("kind", [NoRopeCore, InterleavedRopeCore, NormAfterRopeCore])
def test_other_rotations(kind: type[GqaCore]) -> None:
    plain, layout, widths = gqa()
    changed = kind(plain.layer, plain.shape, *(HeadNorm(wide_norm(32)) for _ in "qk"))
    made = changed, layout, widths
    core = tuned(changed)
    assert isinstance(core, NativeGqa)
    for native, wanted in zip(play(core, made), play(changed, made), strict=True):
        torch.testing.assert_close(native, wanted, rtol=0.02, atol=0.02)


def wide_norm(width: int) -> WideRmsNorm:
    return WideRmsNorm(Draw(1)(width, about=1.0).float(), 1e-5)


@pytest.mark.parametrize("name", ["gqa", "mla", "q8", "q8, mla", "narrow values"])
def test_a_token_is_the_same_in_any_company(name: str) -> None:
    """Alone, beside other tokens and beside another request's prompt: the same bits."""
    made = (CASES | Q8_CASES)[name]()
    core, (_, layout, widths) = tuned(made[0]), made
    rope = layout.planes[0][1] if len(layout.planes) == 2 else 8
    prompt, token = ([Draw(seed)(count, w) for w in widths] for seed, count in ((1, 30), (2, 1)))
    other = [Draw(4)(7, w) for w in widths]

    def last(company: int) -> Tensor:
        mine, theirs = KvCache(layout, 50), KvCache(layout, 50)
        core(*prompt, rows_of([30], [mine], rope))
        mine.advance(30)
        if not company:
            return core(*token, rows_of([1], [mine], rope))[-1]
        joined = [torch.cat((o[:company], t)) for o, t in zip(other, token, strict=True)]
        return core(*joined, rows_of([company, 1], [theirs, mine], rope))[-1]

    alone = last(0)
    assert torch.equal(last(1), alone)
    assert torch.equal(last(7), alone)
    set_compute_threads(1)
    assert torch.equal(last(0), alone)


@pytest.mark.parametrize("width", [5, 64, 2048])
def test_norm(width: int) -> None:
    plain = RmsNorm(Draw(1)(width, about=1.0), 1e-5)
    native = tuned(plain)
    assert isinstance(native, NativeNorm)
    x = Draw(2)(16, width) * 3
    torch.testing.assert_close(native(x), plain(x), rtol=2**-7, atol=1e-6)
    assert float((native(x) != plain(x)).float().mean()) < 0.01
    for row in range(16):
        assert torch.equal(native(x[row : row + 1])[0], native(x)[row])
    many = torch.cat((x, x))
    assert torch.equal(native(many), plain(many))


@pytest.mark.parametrize("width", [5, 64, 2048])
@pytest.mark.parametrize("dtype", [BF16, torch.float32])
def test_wide_norm(width: int, dtype: torch.dtype) -> None:
    """Any number of rows has the same bits."""
    plain = WideRmsNorm(wide_norm(width).weight.to(dtype), 1e-5)
    native = tuned(plain)
    assert isinstance(native, NativeNorm)
    x = Draw(2)(3 * MOST_ROWS, width) * 3
    found = native(x)
    torch.testing.assert_close(found, plain(x), rtol=2**-7, atol=1e-6)
    assert float((found != plain(x)).float().mean()) < 0.01
    for row in range(len(x)):
        assert torch.equal(native(x[row : row + 1])[0], found[row])
    assert torch.equal(native(x.float()), plain(x.float()))


def test_gates() -> None:
    """A value of each row, and of each value; any number of rows has the same bits."""
    plain = SigmoidGate()
    native, draw = tuned(plain), Draw(1)
    assert isinstance(native, NativeGate)
    x = draw(70, 93) * 3
    for width in (1, 93):
        gate = draw(70, width) * 30
        gate[:3] = torch.tensor([[torch.inf], [-torch.inf], [torch.nan]])
        found, wanted = native(x, gate), plain(x, gate)
        torch.testing.assert_close(found, wanted, rtol=2**-7, atol=1e-30, equal_nan=True)
        for row in range(3, 70):
            alone = native(x[row : row + 1], gate[row : row + 1])
            assert torch.equal(alone[0], found[row])
        assert torch.equal(native(x[3:].float(), gate[3:]), plain(x[3:].float(), gate[3:]))


def test_float32_stays_torch() -> None:
    norm = RmsNorm(torch.ones(4), 1e-5)
    assert tuned(norm) is norm
    core = GqaCore(0, GqaShape(2, 2, 8), norm, None)
    assert tuned(core) is core
    bare = tuned(GqaCore(0, GqaShape(2, 2, 8)))  # its inputs, not its weights, give the type
    cache = KvCache(CacheLayout(1, ((2, 8),) * 2, torch.float32, torch.device("cpu")), 4)
    q, k, v = torch.randn(3, 1, 16)
    rows = rows_of([1], [cache], 8)
    torch.testing.assert_close(bare(q, k, v, rows), v)


def router(**changes: object) -> SoftmaxRouter:
    settings: dict[str, object] = {"top_k": 4, "renormalise": False, **changes}
    return SoftmaxRouter(Draw(5)(24, 96) / 10, **settings)  # type: ignore[arg-type]


W, BIAS = Draw(5)(24, 96) / 10, Draw(8)(24)
ROUTERS: dict[str, Router] = {
    "softmax": router(),
    "softmax, normed": router(renormalise=True, scale=2.5),
    "softmax, groups": router(groups=(4, 2), top_k=6),
    "sigmoid": SigmoidRouter(W, BIAS, 4, renormalise=False),
    "sigmoid, normed": SigmoidRouter(W, BIAS.float() / 4, 4, renormalise=True, scale=2.5),
    "sigmoid, groups": SigmoidRouter(W, BIAS / 4, 5, renormalise=True, groups=(4, 2)),
    "biased softmax": BiasedSoftmaxRouter(W, BIAS / 20, 4, renormalise=True),
    "softmax of the best": TopSoftmaxRouter(W, BIAS, 4),
}


@pytest.mark.parametrize("name", list(ROUTERS))
def test_router(name: str) -> None:
    plain = ROUTERS[name]
    native = tuned(plain)
    assert isinstance(native, NativeRouter)
    x = Draw(6)(MOST_ROWS, 96)
    ids, weights = native(x)
    wanted_ids, wanted = plain(x)
    assert torch.equal(ids, wanted_ids)  # no two scores of this draw lie within rounding
    torch.testing.assert_close(weights, wanted, rtol=1e-5, atol=1e-7)
    for row in range(MOST_ROWS):
        alone = native(x[row : row + 1])
        assert torch.equal(alone[0][0], ids[row])
        assert torch.equal(alone[1][0], weights[row])
    many = torch.cat((x, x))
    assert all(torch.equal(a, b) for a, b in zip(native(many), plain(many), strict=True))


@pytest.mark.parametrize(
    "plain",
    [
        SparseMixer(Draw(5)(64, 2048), 0.01),
        SoftmaxRouter(Draw(5)(64, 2048).float(), 6, True),
        SqrtSoftplusRouter(Draw(5)(64, 2048) / 40, Draw(6)(64), 6, True),
    ],
    ids=lambda plain: type(plain).__name__,
)
def test_a_router_in_torch_takes_few_rows_one_by_one(plain: Router) -> None:
    ours, x = tuned(plain), Draw(7)(MOST_ROWS, 2048)
    ids, weights = ours(x)
    for row in range(MOST_ROWS):
        alone = plain(x[row : row + 1])
        assert torch.equal(alone[0][0], ids[row])
        assert torch.equal(alone[1][0], weights[row])
    many = torch.cat((x, x))
    assert all(torch.equal(a, b) for a, b in zip(ours(many), plain(many), strict=True))


def test_a_router_among_equals_and_without_numbers() -> None:
    weight = torch.zeros(6, 64, dtype=BF16)
    weight[4] = 1.0
    native = tuned(SoftmaxRouter(weight, 3, renormalise=True))
    ids, weights = native(torch.ones(1, 64, dtype=BF16))
    assert ids.tolist() == [[4, 0, 1]]  # a tie goes to the lower number
    assert float(weights.sum()) == pytest.approx(1.0)
    ids, weights = native(torch.full((1, 64), torch.nan, dtype=BF16))
    assert sorted(set(ids[0].tolist())) == sorted(ids[0].tolist())
    assert set(ids[0].tolist()) <= set(range(6))
    assert weights.isnan().all()
