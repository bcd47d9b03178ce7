"""Test many rows on the device: the bits of the CPU's kernels and of separate pairs.

Without a GPU, Triton's interpreter runs the kernels (tests/conftest.py).
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

pytest.importorskip("triton", reason="Triton is built for Linux only")

from moeinf.native import LinearKernel, matrix_bytes, tile_columns
from moeinf.offload.format.quantise import dequantise
from moeinf.offload.format.retile import BLOCK_BYTES, retile
from moeinf.offload.gpu_kernels import expert_ffn
from moeinf.offload.gpu_kernels.expert_ffn import rows_of_block
from moeinf.offload.gpu_kernels.grouping import blocks_of
from moeinf.offload.gpu_kernels.linear import tiled_linear
from tests import gguf_blocks
from tests.native.test_kernels import aligned, relative
from tests.offload.device import DEVICE
from tests.offload.gpu_kernels import test_expert_ffn as pairs
from tests.offload.gpu_kernels.test_expert_ffn import UNTOUCHED, Layer, random
from tests.offload.gpu_kernels.test_linear import matrix

pytestmark = pytest.mark.kernel("large")

FORMS = ["q4", "q8", "q3", "q2", "mxfp4", *gguf_blocks.FORMS]
CASES = [case for case in pairs.CASES if case[0] in FORMS]
portable_path = pairs.portable_path


def routed(counts, top_k, absent=0):
    """Return shuffled ids [T, top_k]: counts[e] pairs of expert e and `absent` ids of -1."""
    ids = torch.cat([torch.full((n,), e) for e, n in enumerate(counts)])
    ids = torch.cat((ids, torch.full((absent,), -1)))
    return ids[torch.randperm(len(ids), generator=torch.Generator().manual_seed(2))].view(-1, top_k)


@pytest.mark.parametrize(("form", "activation", "biases", "dtype"), CASES)
def test_blocks_of_pairs_get_the_bits_of_the_cpu_and_of_pairs_alone(
    form, activation, biases, dtype
):
    """Experts of 0, 1, 16, 17 and 33 rows, one that is not resident, ids of -1."""
    layer = Layer(form, 70, 45, activation, biases, count=6)
    ids = routed([0, 1, 16, 17, 33, 8], 2, absent=3)
    table = torch.cat((torch.full((4,), 77), layer.table)).int()
    table[4 + 5] = -1
    x = random(39, 70).to(dtype)
    rows = layer.on_device(x, ids, table, 4)
    assert (rows.view(39, 2, 70)[(ids == 5) | (ids < 0)] == UNTOUCHED).all()
    assert torch.equal(rows, layer.on_cpu(x, torch.where(ids == 5, -1, ids)))
    assert torch.equal(rows[-4:], layer.on_device(x[-2:], ids[-2:], table, 4))  # pair by pair
    places = (ids.flatten() == 4).nonzero().flatten()
    assert relative(rows[places], layer.exact(x[places // 2], 4)) < 0.02


@pytest.mark.parametrize(
    ("form", "tokens"),
    [("q4", 17), ("q4", 33), ("q4", 100), ("q8", 33), ("q3", 33), ("mxfp4", 33), ("q6k", 33)],
)
def test_a_row_does_not_see_how_many_travel_with_it(form, tokens):
    """One expert has all tokens, one only the last: blocks of 16, 32 and 64 rows."""
    layer = Layer(form, 100, 70, count=2)
    x, ids = random(tokens, 100).bfloat16(), torch.zeros(tokens, 2, dtype=torch.int32)
    ids[:, 1] = -1
    ids[-1, 1] = 1
    together = layer.on_device(x, ids)
    assert torch.equal(together, layer.on_cpu(x, ids))
    assert torch.equal(layer.on_device(x[-18:], ids[-18:]), together[-36:])


@settings(max_examples=8, deadline=None, derandomize=True)
@given(data=st.data())
def test_any_shape_routing_and_table(data):
    draw = data.draw
    form, activation = (
        draw(st.sampled_from(FORMS)),
        draw(st.sampled_from(["relu", "relu2", "swiglu"])),
    )
    layer = Layer(form, draw(st.integers(1, 100)), draw(st.integers(1, 100)), activation)
    tokens, top_k = draw(st.integers(17, 70)), draw(st.integers(1, 3))
    x = random(tokens, layer.shape.hidden).bfloat16()
    ids = torch.randint(-1, 3, (tokens, top_k), generator=torch.Generator().manual_seed(tokens))
    here = torch.tensor(draw(st.lists(st.booleans(), min_size=3, max_size=3)))
    table = torch.where(here, layer.table, -1).int()
    absent = (ids >= 0) & ~here[ids.clamp(min=0)]
    assert torch.equal(layer.on_device(x, ids, table), layer.on_cpu(x, ids.where(~absent, -1)))


@settings(max_examples=60, deadline=None, derandomize=True)
@given(data=st.data())
def test_every_pair_is_in_one_block_of_its_expert(data):
    slots = data.draw(st.lists(st.integers(-1, 5), min_size=1, max_size=150))
    rows = data.draw(st.sampled_from([16, 32, 64]))
    experts = max(1, len(set(slots) - {-1}))
    blocks = blocks_of(torch.tensor(slots, dtype=torch.int32), experts, rows)
    assert blocks.most <= len(slots) // rows + experts
    found = []
    for begin in blocks.begins[blocks.begins < len(slots)].tolist():
        end = begin
        while end < min(begin + rows, len(slots)) and blocks.slots[end] == blocks.slots[begin]:
            end += 1
        block = blocks.order[begin:end].tolist()
        assert block == sorted(block)
        assert {slots[pair] for pair in block} == {int(blocks.slots[begin])}
        found += block
    assert sorted(found) == [pair for pair, slot in enumerate(slots) if slot >= 0]


def test_blocks_are_found_without_waiting_for_the_device():
    """On tensors without values, an operation or a shape that needs a value raises."""
    with FakeTensorMode():
        assert blocks_of(torch.zeros(100, dtype=torch.int32), 4, 16).most == 100 // 16 + 4


def test_blocks_are_no_larger_than_what_an_expert_gets():
    assert [rows_of_block(n) for n in (1, 17, 33, 500)] == [16, 32, 64, 64]
    assert [rows_of_block(512 * 8, experts) for experts in (128, 64, 512)] == [32, 64, 16]
    assert rows_of_block(500, form="q6k") == 32


def test_what_triton_cannot_compile_is_not_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton cannot compile blocks of 64 rows on a B200."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for capability, most in (((10, 0), 32), ((9, 0), 64), ((12, 0), 64)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda c=capability: c)
        expert_ffn._most_rows.cache_clear()
        assert [rows_of_block(n) for n in (17, 33, 500)] == [32, most, most]
    expert_ffn._most_rows.cache_clear()


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, in the interpreter
@pytest.mark.parametrize("form", FORMS)
def test_an_activation_that_is_no_number_spoils_its_row_and_no_other(form):
    layer = Layer(form, 32, 32, count=1)
    x, ids = random(20, 32).bfloat16(), torch.zeros(20, 1, dtype=torch.int64)
    clean = layer.on_device(x, ids)
    x[0, 20], x[2, 3] = float("nan"), float("inf")
    spoilt = layer.on_device(x, ids)
    assert spoilt[[0, 2]].isnan().all()
    kept = torch.ones(20, dtype=torch.bool)
    kept[[0, 2]] = False
    assert torch.equal(spoilt[kept], clean[kept])


@pytest.mark.parametrize("form", ["q4", "q8", "mxfp4"])
@pytest.mark.parametrize(
    "byte", [0x00, 0x11, 0x26, 0x43, 0x5A, 0x77, 0x7F, 0x80, 0x88, 0x9B, 0xDC, 0xEE, 0xF7, 0xFF]
)
def test_the_largest_sums_of_a_group_are_exact(form, byte):
    """All codes equal, times activations of 127 and of -127: |d| up to 32 · 127 · 128."""
    data = aligned(matrix_bytes(form, 16, 64))
    data.fill_(byte)
    scales = {"q4": 512, "q8": 1024, "mxfp4": 512}[form]
    data[scales:] = 127  # 1 in E8M0
    if form != "mxfp4":
        data[scales:].view(torch.float16).fill_(1.0)
    x = torch.full((20, 64), 127.0)
    x[1::2, :32] = -127.0
    x[4] = 127.0 * (torch.arange(64) % 2 * 2 - 1)
    wanted = torch.empty(20, 16)
    LinearKernel(form, 16, 64, data.data_ptr()).run(x.data_ptr(), 20, wanted.data_ptr(), True)
    code = {
        "q8": byte - 128,
        "q4": (byte & 15) - 8 + (byte >> 4) - 8,
        "mxfp4": sum(E2M1[c] for c in (byte & 15, byte >> 4)),
    }[form]
    assert wanted[0, 0] == 127 * code * (64 if form == "q8" else 32)
    found = tiled_linear(data.to(DEVICE), form.upper(), 16, 64, None)(x.to(DEVICE)).cpu()
    assert torch.equal(found, wanted)


@pytest.mark.parametrize("form", gguf_blocks.FORMS)
@pytest.mark.parametrize("byte", [0x00, 0x3F, 0x5A, 0x77, 0x80, 0xFE, 0xFF, None])
def test_the_largest_sums_of_interleaved_blocks_are_exact(form, byte):
    """All bytes equal or random, d = 1.5 and dmin = -0.5, times activations of 127 and of -127."""
    columns = 2 * tile_columns(form)
    shape = (16, 2, BLOCK_BYTES[form.upper()])
    blocks = torch.randint(256, shape, generator=torch.Generator().manual_seed(1)).to(torch.uint8)
    if byte is not None:
        blocks.fill_(byte)
    if form != "nvfp4":
        at = 208 if form == "q6k" else 0
        numbers = torch.tensor([1.5, -0.5]).half().view(torch.uint8)
        blocks[..., at : at + 4] = numbers[: blocks.shape[-1] - at]
    data = aligned(matrix_bytes(form, 16, columns))
    data.copy_(retile(blocks.flatten(1), form.upper(), columns))
    x = torch.full((20, columns), 127.0)
    x[1::2, :32] = -127.0
    x[4] = 127.0 * (torch.arange(columns) % 2 * 2 - 1)
    x[5] = 127.0 * (torch.arange(columns) // 16 % 2 * 2 - 1)
    wanted = torch.empty(20, 16)
    kernel = LinearKernel(form, 16, columns, data.data_ptr())
    kernel.run(x.data_ptr(), 20, wanted.data_ptr(), True)
    exact = x.double() @ dequantise(data, form.upper(), 16, columns).double().T
    assert relative(wanted, exact) < 1e-6 if exact.norm() > 0 else (wanted == 0).all()
    ours = tiled_linear(data.to(DEVICE), form.upper(), 16, columns, None)
    assert torch.equal(ours(x.to(DEVICE)).cpu(), wanted)
    assert torch.equal(ours(x[:6].to(DEVICE)).cpu(), wanted[:6])


E2M1 = [sign * value for sign in (1, -1) for value in (0, 0.5, 1, 1.5, 2, 3, 4, 6)]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("rows", "columns"), [(37, 70), (150, 100)])
def test_dense_layers_get_the_cpus_bits_in_any_number_of_rows(form, rows, columns):
    data, there, values = matrix(form, rows, columns)
    ours = tiled_linear(there, form.upper(), rows, columns, None)
    x = random(100, columns).bfloat16()
    wanted = torch.empty(100, rows, dtype=torch.bfloat16)
    LinearKernel(form, rows, columns, data.data_ptr()).run(
        x.data_ptr(), 100, wanted.data_ptr(), False
    )
    for count in (17, 33, 100):
        assert torch.equal(ours(x[:count].to(DEVICE)).cpu(), wanted[:count]), count
    assert relative(wanted, x.double() @ values.double().T) < 0.02


def test_experts_named_by_slots_fill_their_places():
    """The interface of SlotMath, for too many tokens to compute pair by pair."""
    layer = Layer("q4", 32, 24, count=3)
    ids = routed([30, 21, 9], 2)
    x = random(30, 32).bfloat16()
    places = [(ids.flatten() == e).nonzero().flatten().tolist() for e in (0, 2)]
    rows = torch.full((60, 32), UNTOUCHED, dtype=x.dtype, device=DEVICE)
    layer.math.run(x.to(DEVICE), [(2, places[0]), (0, places[1])], 2, rows)
    assert torch.equal(rows.cpu(), layer.on_cpu(x, torch.where(ids == 1, -1, ids)))
