"""Every path of decode attention against float64, and independence of its bits."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from moeinf.models.layers.kv_q8 import VALUES, quantised, row_bytes, widened
from moeinf.native import (
    KV_Q8_VALUES,
    DecodeAttention,
    GqaStep,
    attention_block_keys,
    attention_path,
    compute_threads,
    kv_q8_row_bytes,
    set_compute_threads,
)
from tests.native.drivers import ATTENTION_FILES, Drivers, Program

PATHS = ["portable", "neon", "avx2", "avx512", "avx512bf16"]  # from slow to fast
HERE = [
    path
    for path in PATHS[: PATHS.index(attention_path()) + 1]
    if path != "neon" or platform.machine() == "aarch64"
]


RESULTS = 3 * 7  # of the driver: caches times shapes


@dataclass(frozen=True)
class Shape:
    heads: int
    kv_heads: int
    key_width: int
    value_width: int
    latent: bool = False  # the values are the first columns of the keys
    window: int = 0

    @property
    def scale(self) -> float:
        return float(self.key_width) ** -0.5


SHAPES = {
    "olmoe": Shape(16, 16, 128, 128),
    "qwen3": Shape(16, 2, 128, 128),
    "mixtral": Shape(8, 2, 128, 128),
    "two share": Shape(4, 2, 64, 64),
    "mla": Shape(16, 1, 576, 512, latent=True),
    "mla, 40 heads": Shape(40, 1, 96, 64, latent=True),
    "odd": Shape(6, 2, 37, 21),
    "no pairs": Shape(5, 1, 80, 80),
    "three share": Shape(3, 1, 64, 96),
    "window": Shape(4, 2, 64, 64, window=130),
    "gpt-oss": Shape(64, 8, 64, 64, window=128),
}


@pytest.fixture(autouse=True)
def two_threads() -> Iterator[None]:
    before, torchs = compute_threads(), torch.get_num_threads()
    set_compute_threads(2)
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(torchs)
    set_compute_threads(before)


@dataclass
class Case:
    """Requests with caches of given lengths, and room for 7 tokens more."""

    shape: Shape
    q: Tensor  # [R, H, W]
    planes: list[tuple[Tensor, Tensor]]  # [G, capacity, W or V] each
    counts: list[int]
    sinks: Tensor | None = None  # [H] float32
    in_q8: bool = False  # the planes are rows of kv_q8.py

    def run(self, path: str | None = None) -> Tensor:
        """Return the attention output [R, H, V] of a path."""
        shape = self.shape
        attend = DecodeAttention(
            shape.heads,
            shape.kv_heads,
            shape.key_width,
            shape.value_width,
            shape.scale,
            bf16=self.q.dtype == torch.bfloat16,
            window=shape.window,
            sinks=0 if self.sinks is None else self.sinks.data_ptr(),
            q8=self.in_q8,
        )
        out = self.q.new_full((len(self.q), shape.heads, shape.value_width), 99.0)
        requests = [
            (k.data_ptr(), v.data_ptr(), *k.stride()[:2], *v.stride()[:2], count)
            for (k, v), count in zip(self.planes, self.counts, strict=True)
        ]
        attend(self.q.data_ptr(), out.data_ptr(), requests, path)
        return out

    def exact(self) -> Tensor:
        """Return the attention output [R, H, V] in float64."""
        rows = []
        for q, (k, v), count in zip(self.q, self.planes, self.counts, strict=True):
            first = max(0, count - self.shape.window) if self.shape.window else 0
            share = self.shape.heads // self.shape.kv_heads
            keys, values = (
                x[:, first:count].double().repeat_interleave(share, 0) for x in (k, v)
            )  # [H, S, …]
            scores = (keys @ q.double()[..., None])[..., 0] * self.shape.scale  # [H, S]
            if self.sinks is not None:
                scores = torch.cat((scores, self.sinks.double()[:, None]), 1)
                values = torch.cat((values, torch.zeros_like(values[:, :1])), 1)
            rows.append((scores.softmax(-1)[:, None] @ values)[:, 0])
        return torch.stack(rows)

    def part(self, request: int) -> Case:
        here = slice(request, request + 1)
        return replace(
            self, q=self.q[here].clone(), planes=self.planes[here], counts=self.counts[here]
        )

    def as_q8(self) -> Case:
        """Return the case with its caches in q8."""
        planes = []
        for k, v in self.planes:
            keys = quantised(k)
            planes.append((keys, keys if self.shape.latent else quantised(v)))
        return replace(self, planes=planes, in_q8=True)

    def widened(self) -> Case:
        """Return the same case with the values of its caches in q8 as float32."""
        shape, planes = self.shape, []
        for k, v in self.planes:
            keys = widened(k, shape.key_width, torch.float32)
            values = keys if shape.latent else widened(v, shape.value_width, torch.float32)
            planes.append((keys, values[..., : shape.value_width]))
        return replace(self, planes=planes, in_q8=False)


def make(name: str, dtype: torch.dtype, counts: list[int]) -> Case:
    """Draw queries long enough that attention is neither uniform nor on a single key."""
    shape, draw = SHAPES[name], torch.Generator().manual_seed(5)
    q = 2 * torch.randn(len(counts), shape.heads, shape.key_width, generator=draw)
    planes = []
    for count in counts:
        size = (shape.kv_heads, count + 7)
        k = torch.randn(*size, shape.key_width, generator=draw).to(dtype)
        v = torch.randn(*size, shape.value_width, generator=draw).to(dtype)
        k[:, count:] = v[:, count:] = torch.nan  # positions without a token must not be read
        planes.append((k, k[..., : shape.value_width] if shape.latent else v))
    return Case(shape, q.to(dtype), planes, counts)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", list(SHAPES))
def test_against_float64(name: str, dtype: torch.dtype, path: str) -> None:
    if path not in HERE:
        pytest.skip(f"this processor has no {path}")
    case = make(name, dtype, [1, 15, 64, 65, 129, 600])
    wrong = (case.run(path).double() - case.exact()).abs()
    if dtype == torch.float32:
        assert float(wrong.max()) < 3e-6
    else:
        # Rounding the exact result has an error of up to 2^-9 of it.
        assert bool((wrong <= 2**-8 * case.exact().abs() + 4e-3).all())
        ideal = (case.exact().bfloat16().double() - case.exact()).pow(2).mean()
        assert float(wrong.pow(2).mean()) < 2.5 * float(ideal)


@pytest.mark.parametrize("path", PATHS[:-1])
@pytest.mark.parametrize("name", list(SHAPES))
def test_q8_against_float64(name: str, path: str) -> None:
    """Against the values that the rows stand for, not against those that were quantised."""
    if path not in HERE:
        pytest.skip(f"this processor has no {path}")
    case = make(name, torch.bfloat16, [1, 15, 65, 129, 600]).as_q8()
    exact = case.widened().exact()
    wrong = (case.run(path).double() - exact).abs()
    assert bool((wrong <= 2**-8 * exact.abs() + 2e-4).all())
    ideal = (exact.bfloat16().double() - exact).pow(2).mean()
    assert float(wrong.pow(2).mean()) < 1.1 * float(ideal)


@pytest.mark.full
@pytest.mark.timeout(600)  # with two builds, beside other builds
def test_bits_do_not_depend_on_the_compiler(drivers: Drivers) -> None:
    """Compare GCC's results with those of zig's clang on every path of this processor."""
    gcc, zig = (Program("attention_driver", ATTENTION_FILES, zig=zig) for zig in (False, True))
    drivers.start([gcc, zig])
    for path in HERE:
        wanted, found = (drivers.run(program, path) for program in (gcc, zig))
        assert (wanted.returncode, found.returncode) == (0, 0), found.stderr
        assert len(wanted.stdout.splitlines()) == RESULTS
        assert found.stdout == wanted.stdout


def test_q8_rows() -> None:
    """The bytes of a token that a step appends are those that a prompt writes."""
    x = torch.randn(6, 1, 74, generator=torch.Generator().manual_seed(1)).bfloat16()
    x[0, :, :32] = 0.0
    x[1, :, 40] = 3e38
    x[2] *= 1e-35
    x[3, :, 5] = torch.inf
    angles = torch.zeros(6, 37), torch.ones(6, 37)
    step = GqaStep(1, 1, 74, 1.0, 0, None, None, 0.0)
    wanted = quantised(x)
    assert wanted.shape[-1] == kv_q8_row_bytes(74) == row_bytes(74) == 80
    assert kv_q8_row_bytes(KV_Q8_VALUES) == row_bytes(VALUES)
    assert kv_q8_row_bytes(37) == row_bytes(37) == 42, "an even number of bytes"
    found = torch.full((2, 6, 1, 80), 77, dtype=torch.uint8)
    keys, values = found
    sizes = (80, 80, 80, 80, 1)
    rows = [(k.data_ptr(), v.data_ptr(), *sizes) for k, v in zip(keys, values, strict=True)]
    out, (sin, cos) = torch.empty_like(x), angles
    where = [one.data_ptr() for one in (x, x, x, cos, sin)]
    step(*where, 37, out.data_ptr(), rows, q8=True)
    assert torch.equal(values, wanted)
    finite = [0, 1, 2, 4, 5]  # rope makes NaN of infinity
    assert torch.equal(keys[finite], wanted[finite])
    assert torch.equal(widened(wanted, 74, torch.float32)[2], torch.zeros(1, 74))
    assert not out[3, :, :32].isfinite().any(), "infinity is not lost"


@pytest.mark.parametrize("path", HERE)
@pytest.mark.parametrize("in_q8", [False, True])
@pytest.mark.parametrize("name", ["olmoe", "mla", "odd", "window"])
def test_bits_depend_on_query_and_cache_alone(name: str, in_q8: bool, path: str) -> None:
    """Threads, other requests of the call and the cache's address do not change the bits."""
    case = make(name, torch.bfloat16, [700, 3, 257, 700])
    case = case.as_q8() if in_q8 else case
    together = case.run(path)
    for threads in (1, 2, 3):
        set_compute_threads(threads)
        assert torch.equal(case.run(path), together)
    for request in range(4):
        alone = case.part(request)
        assert torch.equal(alone.run(path)[0], together[request])
        k, v = alone.planes[0]
        wider = torch.cat((k, k), 1)
        values = wider[..., : v.shape[2]] if SHAPES[name].latent else torch.cat((v, v), 1)
        alone.planes = [(wider, values)]
        assert torch.equal(alone.run(path)[0], together[request])


def test_many_blocks() -> None:
    """More keys than kMinBlockKeys · kMaxBlocks: the blocks grow, their number does not."""
    sizes = [attention_block_keys(n) for n in (1, 256, 4096, 4097, 20_000)]
    assert sizes == [256, 256, 256, 512, 1280]
    case = make("two share", torch.float32, [9000])
    wrong = (case.run().double() - case.exact()).abs()
    assert float(wrong.max()) < 3e-6


@pytest.mark.parametrize("path", HERE)
def test_scores_far_apart(path: str) -> None:
    """The last key outweighs all others by far: the earlier sum is scaled to zero."""
    case = make("two share", torch.bfloat16, [200])
    k, v = case.planes[0]
    k[:, :200] = -k[:, :200].abs() * 30
    k[:, 199] = 60
    case.q = case.q.abs()
    expected = v[:, 199].repeat_interleave(2, 0)
    assert torch.equal(case.run(path)[0], expected)


@pytest.mark.parametrize("path", HERE)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["qwen3", "gpt-oss", "odd"])
def test_sinks(name: str, dtype: torch.dtype, path: str) -> None:
    """Before the window is full, when it is just full, and far beyond it."""
    case = make(name, dtype, [1, 5, 128, 300])
    without = case.run(path)
    case.sinks = torch.linspace(-3, 9, SHAPES[name].heads)
    wrong = (case.run(path).double() - case.exact()).abs()
    if dtype == torch.float32:
        assert float(wrong.max()) < 3e-6
    else:
        assert bool((wrong <= 2**-8 * case.exact().abs() + 4e-3).all())
    assert float((case.exact() - without.double()).abs().max()) > 0.1


def test_refused() -> None:
    with pytest.raises(ValueError, match="multiple of kv_heads"):
        DecodeAttention(3, 2, 8, 8, 1.0, bf16=False)
    case = make("odd", torch.float32, [3])
    with pytest.raises(ValueError, match="no attention path sse9"):
        case.run("sse9")
    with pytest.raises(ValueError, match="queries in bfloat16"):
        DecodeAttention(2, 2, 8, 8, 1.0, bf16=False, q8=True)
    case.counts = [0]
    with pytest.raises(ValueError, match="without tokens"):
        case.run()
