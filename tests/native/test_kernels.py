"""The kernels: paths against each other and against float64, one row against many rows."""

import ctypes
import mmap
import os

import pytest
import torch

from moeinf.native import (
    ExpertKernel,
    LinearKernel,
    RouterKernel,
    _native,
    combine_rows,
    compute_threads,
    dequantise_rows,
    is_gated,
    kernel_path,
    matrix_bytes,
    quantise_rows,
    set_compute_threads,
)
from moeinf.runtime.checkpoints.quantised.fused_experts import tile_blocks
from tests import gguf_blocks

FORMATS = ["q4", "q8", "q3", "q2", "mxfp4", *gguf_blocks.FORMS, "bf16"]
ACTIVATIONS = ["swiglu", "swiglu10", "clamped_swiglu", "geglu", "relu", "relu2"]
MIXED = [("q4", "q8"), ("q8", "q4"), ("mxfp4", "q8"), ("q3", "q2")]  # gate and up, down
PATHS = ["portable", "avx2", "avx512", "amx", "neon", "neon-i8mm"]
SHAPES = [(64, 64), (37, 70), (5, 33), (16, 1), (1, 200), (130, 300)]


@pytest.fixture(autouse=True)
def fastest_path():
    yield
    assert _native._use_kernels("")


def use(path: str) -> bool:  # the path, if the processor has it
    return bool(_native._use_kernels(path))


def aligned(size: int) -> torch.Tensor:
    raw = torch.empty(size + 64, dtype=torch.uint8)
    start = -raw.data_ptr() % 64
    return raw[start : start + size]


def stored(weights: torch.Tensor, form: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the bytes of float32 weights in a format, and the values that they encode."""
    rows, columns = weights.shape
    if form == "bf16":
        return weights.bfloat16().view(torch.uint8).flatten(), weights.bfloat16().float()
    data = aligned(matrix_bytes(form, rows, columns))
    if form == "mxfp4":
        blocks, scales, values = mxfp4(weights)
        return data.copy_(tile_blocks(blocks, scales)), values
    if form in gguf_blocks.FORMS:
        data.copy_(gguf_blocks.tiled(weights, form))
    else:
        quantise_rows(weights.data_ptr(), rows, columns, True, form, data.data_ptr())
    values = torch.empty(rows, columns)
    dequantise_rows(data.data_ptr(), form, rows, columns, values.data_ptr())
    return data, values


E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def mxfp4(weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return blocks, scales and values of an MXFP4 matrix near the weights."""
    rows, columns = weights.shape
    groups = torch.nn.functional.pad(weights, (0, -columns % 32)).view(rows, -1, 32)
    power = (groups.abs().amax(-1, keepdim=True) / 6).log2().ceil().clamp(-127, 127)
    codes = (groups.abs() / 2**power)[..., None].sub(E2M1).abs().argmin(-1)  # [R, G, 32]
    values = E2M1[codes] * 2**power * groups.sign()
    codes += 8 * (groups < 0)
    blocks = (codes[..., ::2] | codes[..., 1::2] << 4).to(torch.uint8)
    return blocks, (power[..., 0] + 127).to(torch.uint8), values.flatten(1)[:, :columns]


def test_mxfp4_tiles_are_drawn_as_in_tiles_h():
    blocks = torch.randint(256, (19, 3, 16), generator=torch.Generator().manual_seed(4))
    scales = torch.randint(255, (19, 3), generator=torch.Generator().manual_seed(5))
    tiles = tile_blocks(blocks.to(torch.uint8), scales.to(torch.uint8))
    assert len(tiles) == matrix_bytes("mxfp4", 19, 96) == 2 * 2 * 544
    for row in range(19):
        for k in range(96):
            tile = tiles[544 * (2 * (row // 16) + k // 64) :]
            half, at, r = k % 64 // 32, k % 32, row % 16
            byte = int(tile[256 * half + at % 16 // 4 * 64 + 4 * r + at % 4])
            wanted = int(blocks[row, k // 32, at // 2]) >> 4 * (at % 2) & 15
            assert (byte & 15 if at < 16 else byte >> 4) == wanted
            assert tile[512 + 16 * half + r] == scales[row, k // 32]


def test_every_mxfp4_scale_is_the_power_that_it_names():
    """A matrix of ones with every scale but 255, which is NaN, times a row that is exact."""
    scales = torch.arange(255, dtype=torch.uint8)[:, None]
    data = aligned(matrix_bytes("mxfp4", 255, 32))
    data.copy_(tile_blocks(torch.full((255, 1, 16), 0x22, dtype=torch.uint8), scales))
    x = torch.full((1, 32), 127.0) * (torch.arange(32) == 5)
    for path in [path for path in PATHS if use(path)]:
        out = linear("mxfp4", data, (255, 32), x)[0].double()
        wanted = 127 * 2.0 ** (torch.arange(255).double() - 127)
        within = wanted < 2.0**128  # else infinite
        assert torch.equal(out[within][1:], wanted[within][1:]), path
        assert out[~within].isinf().all()


def linear(form: str, data: torch.Tensor, shape: tuple[int, int], x: torch.Tensor) -> torch.Tensor:
    out = torch.full((len(x), shape[0]), 7.0, dtype=x.dtype)
    kernel = LinearKernel(form, *shape, data.data_ptr())
    kernel.run(x.data_ptr(), len(x), out.data_ptr(), x.dtype == torch.float32)
    return out


def relative(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found.double() - wanted.double()).norm() / wanted.double().norm())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("shape", SHAPES)
def test_paths_agree_in_every_bit_and_rows_do_not_see_each_other(shape, form, dtype):
    generator = torch.Generator().manual_seed(3)
    data, values = stored(torch.randn(shape, generator=generator) * 0.02, form)
    x = torch.randn(17, shape[1], generator=generator).to(dtype)
    assert use("portable")
    reference = linear(form, data, shape, x)
    assert relative(reference, x.double() @ values.double().T) < 0.01
    for path in [path for path in PATHS if use(path)]:
        for count in (1, 2, 3, 4, 7, 8, 11, 16, 17):
            assert torch.equal(linear(form, data, shape, x[:count]), reference[:count]), path
        for row in (1, 9):
            alone = x[row : row + 1].clone()
            assert torch.equal(linear(form, data, shape, alone)[0], reference[row])


@pytest.mark.parametrize(
    ("form", "least", "most"),
    [("q2", 0.31, 0.34), ("q3", 0.16, 0.18), ("q4", 0.07, 0.09), ("q8", 0.004, 0.006)],
)
def test_searched_scales_leave_this_much_of_a_normal_matrix(form, least, most):
    weights = torch.randn(64, 512, generator=torch.Generator().manual_seed(1)) * 0.02
    assert least < relative(stored(weights, form)[1], weights) < most


def test_q4_is_nearer_than_rounding_to_the_largest_weight():
    weights = torch.randn(64, 512, generator=torch.Generator().manual_seed(1))
    groups = weights.view(64, 16, 32)
    at = groups.abs().argmax(-1, keepdim=True)
    scale = (groups.gather(-1, at) / -8).half().float()
    plain = (groups / scale).round().clamp(-8, 7) * scale
    ours = relative(stored(weights, "q4")[1], weights)
    assert ours < 0.95 * relative(plain.view_as(weights), weights)


@pytest.mark.parametrize("form", ["q2", "q3", "q4", "q8"])
def test_every_path_writes_the_same_tiles(form):
    weights = torch.randn(40, 100, generator=torch.Generator().manual_seed(2))
    weights[3, 5], weights[20] = 1e-38, 0.0
    tiles = [stored(weights, form)[0] for path in PATHS if use(path)]
    assert all(torch.equal(tile, tiles[0]) for tile in tiles)
    assert (stored(weights, form)[1][20] == 0).all()


@pytest.mark.parametrize("form", ["q2", "q3", "q4", "q8"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_weight_that_is_no_number_spoils_its_row_and_no_other(form, bad):
    weights = torch.randn(20, 64, generator=torch.Generator().manual_seed(2))
    clean = stored(weights, form)[1]
    weights[4, 40] = bad
    values = stored(weights, form)[1]
    assert values[4, 32:].isnan().all()
    assert torch.equal(values[:4], clean[:4])
    assert torch.equal(values[5:], clean[5:])


@pytest.mark.parametrize("form", ["q2", "q3", "q4", "q8"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_an_activation_that_is_no_number_spoils_its_row_and_no_other(form, bad):
    data, _ = stored(torch.randn(20, 64, generator=torch.Generator().manual_seed(2)), form)
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(3))
    for path in [path for path in PATHS if use(path)]:
        clean = linear(form, data, (20, 64), x)
        spoilt = x.clone()
        spoilt[1, 40] = bad
        out = linear(form, data, (20, 64), spoilt)
        assert out[1].isnan().all(), path
        assert torch.equal(out[::2], clean[::2])


def experts_of(
    form: str, count: int, hidden: int, inner: int, gated: bool = True, biases: float = 0.0,
    down: str = "",
) -> tuple[list, list]:  # fmt: skip
    """Return the bytes of each expert, and the values of its matrices and biases in order."""
    generator = torch.Generator().manual_seed(5)
    data, values = [], []
    shapes = [(inner, hidden)] * (1 + gated) + [(hidden, inner)]
    for _ in range(count):
        made = [torch.randn(shape, generator=generator) * 0.05 for shape in shapes]
        parts = [*(stored(one, form) for one in made[:-1]), stored(made[-1], down or form)]
        if biases:
            parts += [
                stored(torch.randn(1, shape[0], generator=generator) * biases, "bf16")
                for shape in shapes
            ]
        whole = aligned(sum(len(part) for part, _ in parts))
        whole.copy_(torch.cat([part for part, _ in parts]))
        data.append(whole)
        values.append([value for _, value in parts])
    return data, values


@pytest.mark.parametrize(("form", "down"), [*((form, "") for form in FORMATS), *MIXED])
@pytest.mark.parametrize(("hidden", "inner"), [(64, 32), (70, 45), (130, 96)])
def test_experts_agree_with_float64_and_every_path_and_thread_count(form, hidden, inner, down):
    data, values = experts_of(form, 4, hidden, inner, down=down)
    generator = torch.Generator().manual_seed(6)
    tokens, top_k = 19, 2
    x = torch.randn(tokens, hidden, generator=generator).bfloat16()
    ids = torch.randint(0, 4, (tokens * top_k,), generator=generator)
    ids[7] = -1
    kernel = ExpertKernel(form, hidden, inner, down=down)
    assert kernel.expert_bytes == len(data[0])

    def run(chosen: torch.Tensor) -> torch.Tensor:
        out = torch.full((tokens * top_k, hidden), 5.0, dtype=torch.bfloat16)
        groups = [(e, (chosen == e).nonzero().flatten()) for e in range(4)]
        kernel.run(
            [data[e].data_ptr() for e, _ in groups],
            [places.tolist() for _, places in groups],
            x.data_ptr(), tokens, top_k, out.data_ptr(), False,
        )  # fmt: skip
        return out

    assert use("portable")
    reference = run(ids)
    assert (reference[7] == 5).all()
    for place, expert in enumerate(ids.tolist()):
        if expert >= 0:
            gate, up, down = (value.double() for value in values[expert])
            row = x[place // top_k].double()
            wanted = down @ (torch.nn.functional.silu(gate @ row) * (up @ row))
            assert relative(reference[place], wanted) < 0.02
    threads = compute_threads()
    try:
        for path in [path for path in PATHS if use(path)]:
            for count in (1, 2, 3):
                set_compute_threads(count)
                assert torch.equal(run(ids), reference), (path, count)
            one = torch.full_like(ids, -1)
            one[12] = ids[12]
            assert torch.equal(run(one)[12], reference[12])
    finally:
        set_compute_threads(threads)


def test_experts_read_the_rows_that_are_named_and_no_others():
    """Row 0 of x lies in a page without read access."""
    page, width = mmap.PAGESIZE, mmap.PAGESIZE // 4
    data, _ = experts_of("q8", 1, width, 32)
    kernel = ExpertKernel("q8", width, 32)
    rows = mmap.mmap(-1, 2 * page)
    x = torch.frombuffer(rows, dtype=torch.float32).view(2, width)
    x[1] = torch.randn(width, generator=torch.Generator().manual_seed(4))

    def run() -> torch.Tensor:
        out = torch.zeros(2, width)
        kernel.run([data[0].data_ptr()], [[1]], x.data_ptr(), 2, 1, out.data_ptr(), True)
        return out[1]

    wanted, libc = run(), ctypes.CDLL(None)
    child = os.fork()
    if child == 0:
        libc.mprotect(ctypes.c_void_p(x.data_ptr()), page, 0)  # PROT_NONE
        os._exit(0 if torch.equal(run(), wanted) else 1)
    assert os.waitpid(child, 0)[1] == 0


def between(activation: str, products: list[torch.Tensor]) -> torch.Tensor:
    """Compute the activations by definition, in the precision of their arguments."""
    if activation == "relu":
        return products[0].clamp(min=0)
    if activation == "relu2":
        return products[0].clamp(min=0).square()
    gate, up = products
    if activation == "swiglu":
        return gate / (1 + (-gate).exp()) * up
    if activation == "swiglu10":
        return torch.nn.functional.silu(gate.clamp(max=10)) * up.clamp(-10, 10)
    if activation == "geglu":
        return torch.nn.functional.gelu(gate, approximate="tanh") * up
    gate, up = gate.clamp(max=7), up.clamp(-7, 7)
    return (up + 1) * gate / (1 + (-1.702 * gate).exp())


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("biases", [0.0, 6.0])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations_and_biases_agree_with_float64_on_every_path(activation, biases, form):
    hidden, inner = 70, 45  # biases of 6: about half of the values to clamp are beyond the limit
    gated = is_gated(activation)
    data, values = experts_of(form, 1, hidden, inner, gated, biases)
    kernel = ExpertKernel(form, hidden, inner, activation, biases > 0)
    assert kernel.expert_bytes == len(data[0])
    x = torch.randn(16, hidden, generator=torch.Generator().manual_seed(6))

    def run(rows: torch.Tensor) -> torch.Tensor:
        out, places = torch.full((len(rows), hidden), 5.0), list(range(len(rows)))
        kernel.run(
            [data[0].data_ptr()], [places], rows.data_ptr(), len(rows), 1, out.data_ptr(), True
        )
        return out

    *inners, down = (value.double() for value in values[0][: 2 + gated])
    offsets = [value.double() for value in values[0][2 + gated :]] or [0.0] * 3
    products = [x.double() @ w.T + b for w, b in zip(inners, offsets, strict=False)]
    wanted = between(activation, products) @ down.T + offsets[len(inners)]
    assert use("portable")
    reference = run(x)
    assert relative(reference, wanted) < (0.005 if form == "bf16" else 0.015)
    for path in [path for path in PATHS if use(path)]:
        for count in range(1, 17):
            assert torch.equal(run(x[:count].clone()), reference[:count]), (path, count)
    x[3, 4] = float("nan")
    assert run(x)[3].isnan().all()
    assert torch.equal(run(x)[4:], reference[4:])


def test_combining_is_what_torch_does_term_by_term():
    generator = torch.Generator().manual_seed(8)
    rows = torch.randn(3, 4, 300, generator=generator).bfloat16()
    weights = torch.rand(3, 4, generator=generator)
    out = torch.empty(3, 300, dtype=torch.bfloat16)
    combine_rows(rows.data_ptr(), weights.data_ptr(), 3, 4, 300, out.data_ptr(), False)
    total = rows[:, 0].float() * weights[:, 0, None]
    for k in range(1, 4):
        total += rows[:, k].float() * weights[:, k, None]
    assert torch.equal(out, total.bfloat16())


@pytest.mark.parametrize(("groups", "kept"), [(1, 1), (5, 2)])
def test_a_router_chooses_the_same_on_every_path_and_thread_count(groups, kept):
    generator = torch.Generator().manual_seed(9)
    weight = (torch.randn(40, 130, generator=generator) / 10).bfloat16()
    x = torch.randn(7, 130, generator=generator).bfloat16()
    kernel = RouterKernel(weight.data_ptr(), 40, 130, 6, True, 1.5, groups, kept)

    def run() -> tuple[list, list]:
        ids, weights = torch.empty(7, 6, dtype=torch.int64), torch.empty(7, 6)
        kernel.run(x.data_ptr(), 7, ids.data_ptr(), weights.data_ptr())
        return ids.tolist(), weights.tolist()

    scores = (x.double() @ weight.double().T).softmax(-1).view(7, groups, -1)
    best = scores.amax(-1).topk(kept).indices
    mask = torch.zeros(7, groups, dtype=torch.float64).scatter(1, best, 1.0)
    wanted, wanted_ids = (scores * mask[..., None]).flatten(1).topk(6)
    reference = None
    threads = compute_threads()
    try:
        for path in [path for path in PATHS if use(path)]:
            for count in (1, 3):
                set_compute_threads(count)
                reference = reference or run()
                assert run() == reference, (path, count)
    finally:
        set_compute_threads(threads)
    assert reference is not None
    assert reference[0] == wanted_ids.tolist()
    normed = 1.5 * wanted / wanted.sum(-1, keepdim=True)
    torch.testing.assert_close(torch.tensor(reference[1]), normed.float(), rtol=1e-5, atol=0)


def test_what_cannot_be_is_refused():
    weight = torch.zeros(4, 8).bfloat16().data_ptr()
    with pytest.raises(ValueError, match="all experts"):
        RouterKernel(weight, 4, 8, 5, False, 1.0, 1, 1)
    for groups, kept in ((3, 1), (2, 3), (0, 0)):
        with pytest.raises(ValueError, match="groups are equal"):
            RouterKernel(weight, 4, 8, 2, False, 1.0, groups, kept)
    with pytest.raises(ValueError, match="no kernel for the format"):
        matrix_bytes("q5", 1, 1)
    with pytest.raises(ValueError, match="sizes lie in"):
        matrix_bytes("q4", 0, 1)
    with pytest.raises(ValueError, match="multiples of 64"):
        LinearKernel("q4", 16, 64, aligned(9000).data_ptr() + 32)
    data, _ = experts_of("q8", 1, 32, 32)
    x = torch.zeros(1, 32)
    with pytest.raises(IndexError, match="place 1 of 1"):
        ExpertKernel("q8", 32, 32).run(
            [data[0].data_ptr()], [[1]], x.data_ptr(), 1, 1, x.data_ptr(), True
        )
    with pytest.raises(ValueError, match="no kernel for the activation 'gelu'"):
        ExpertKernel("q8", 32, 32, "gelu")
    assert not _native._use_kernels("sse")
    assert kernel_path() in PATHS
