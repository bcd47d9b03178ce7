"""Test experts on the device: the bits of the CPU's kernels, from the same bytes, by a slot table.

Without a GPU, Triton's interpreter runs the kernels (tests/conftest.py).
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton", reason="Triton is built for Linux only")

from moeinf.models.layers.moe import TorchMath
from moeinf.native import ExpertKernel, _native, combine_rows, is_gated
from moeinf.offload.format.layout import ExpertLayout
from moeinf.offload.gpu_kernels.expert_ffn import DeviceMath
from tests import gguf_blocks
from tests.native.test_kernels import between, experts_of, relative
from tests.offload.device import DEVICE

pytestmark = pytest.mark.kernel("large")

FORMS = ["q4", "q8", "q3", "q2", "mxfp4", *gguf_blocks.FORMS, "bf16"]
ACTIVATIONS = [
    ("swiglu", 0.0, torch.bfloat16), ("clamped_swiglu", 6.0, torch.float32),
    ("relu", 0.5, torch.bfloat16), ("geglu", 0.0, torch.bfloat16),
    ("relu2", 0.0, torch.bfloat16), ("swiglu10", 6.0, torch.float32),
]  # fmt: skip
CASES = [("q4", *activation) for activation in ACTIVATIONS]
CASES += [(form, *ACTIVATIONS[i % 6]) for i, form in enumerate(FORMS) if form != "q4"]
UNTOUCHED = 5.0


@pytest.fixture(autouse=True)
def portable_path():
    assert _native._use_kernels("portable")
    yield
    assert _native._use_kernels("")


class Layer:
    """Some experts: in a device arena, last expert first, and for the CPU's kernel."""

    def __init__(self, form, hidden, inner, activation="swiglu", biases=0.0, count=3, down=""):
        self.shape = ExpertLayout(hidden, inner, form.upper(), activation, biases > 0, down.upper())
        self.data, self.values = experts_of(
            form, count, hidden, inner, is_gated(activation), biases, down
        )
        arena = torch.zeros(count, self.shape.slot_bytes, dtype=torch.uint8)
        for expert, data in enumerate(self.data):
            arena[count - 1 - expert, : len(data)] = data
        self.math = DeviceMath(self.shape, arena.to(DEVICE), TorchMath(activation))
        self.table = torch.arange(count - 1, -1, -1, dtype=torch.int32)
        self.kernel = ExpertKernel(form, hidden, inner, activation, biases > 0, down)

    def on_device(self, x, ids, table=None, first_cell=0):
        rows = torch.full((ids.numel(), x.shape[1]), UNTOUCHED, dtype=x.dtype, device=DEVICE)
        table = self.table if table is None else table
        self.math.run_routed(x.to(DEVICE), ids.to(DEVICE), table.to(DEVICE), first_cell, rows)
        return rows.cpu()

    def on_cpu(self, x, ids):
        """Return the rows of the CPU; ids below zero leave their rows unchanged."""
        rows = torch.full((ids.numel(), x.shape[1]), UNTOUCHED, dtype=x.dtype)
        places = [(ids.flatten() == e).nonzero().flatten().tolist() for e in range(len(self.data))]
        self.kernel.run(
            [data.data_ptr() for data in self.data], places, x.data_ptr(), len(x), ids.shape[1],
            rows.data_ptr(), x.dtype == torch.float32,
        )  # fmt: skip
        return rows

    def exact(self, x, expert):
        """Return the result in float64, [T, D]."""
        *inners, down = (v.double() for v in self.values[expert] if v.shape[0] > 1)
        biases = [v.double() for v in self.values[expert] if v.shape[0] == 1] or [0.0] * 3
        products = [x.double() @ w.T + b for w, b in zip(inners, biases, strict=False)]
        return between(self.shape.activation, products) @ down.T + biases[len(inners)]


def random(*shape, seed=6):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(("form", "activation", "biases", "dtype"), CASES)
def test_pairs_on_the_device_get_the_cpus_bits_and_others_are_left_alone(
    form, activation, biases, dtype
):
    layer = Layer(form, 70, 45, activation, biases)
    x, ids = random(3, 70).to(dtype), torch.tensor([[2, 0], [1, -1], [1, 2]])
    table = torch.cat((torch.full((4,), 77), layer.table)).int()
    table[4 + 1] = -1  # expert 1 is not resident
    rows = layer.on_device(x, ids, table, 4)
    assert (rows[2:5] == UNTOUCHED).all()
    wanted = layer.on_cpu(x, torch.where(ids == 1, -1, ids))
    assert torch.equal(rows, wanted)
    for place, expert in ((0, 2), (1, 0), (5, 2)):
        exact = layer.exact(x[place // 2 : place // 2 + 1], expert)[0]
        assert relative(rows[place], exact) < (0.005 if form == "bf16" else 0.02)


@pytest.mark.parametrize(("form", "down"), [("q4", "q8"), ("q8", "q4"), ("mxfp4", "q8")])
@pytest.mark.parametrize("tokens", [3, 18])  # pair by pair, and on tensor cores
def test_a_down_of_another_format_gets_the_cpus_bits(form, down, tokens):
    layer = Layer(form, 70, 45, "clamped_swiglu", 0.5, down=down)
    assert layer.kernel.expert_bytes == layer.shape.data_bytes
    x = random(tokens, 70).bfloat16()
    ids = torch.tensor([[2, 0], [1, -1], [1, 2]]).repeat(tokens // 3, 1)
    rows = layer.on_device(x, ids)
    assert torch.equal(rows, layer.on_cpu(x, ids))
    assert relative(rows[0], layer.exact(x[:1], 2)[0]) < 0.02


@pytest.mark.parametrize("form", FORMS)
def test_a_row_does_not_see_how_many_travel_with_it(form):
    layer = Layer(form, 32, 20, "relu", count=2)
    tokens = 16 if form == "q4" else 6
    x, ids = random(tokens, 32).bfloat16(), (torch.arange(tokens) % 2)[:, None]
    together = layer.on_device(x, ids)
    assert torch.equal(together, layer.on_cpu(x, ids))
    for first, last in ((0, 3), (4, 5), (tokens - 2, tokens)):
        assert torch.equal(layer.on_device(x[first:last], ids[first:last]), together[first:last])


@settings(max_examples=8, deadline=None, derandomize=True)
@given(data=st.data())
def test_any_shape_routing_and_table(data):
    draw = data.draw
    form = draw(st.sampled_from(FORMS))
    layer = Layer(form, draw(st.integers(1, 140)), draw(st.integers(1, 70)), "relu", count=2)
    tokens, top_k = draw(st.integers(1, 3)), draw(st.integers(1, 2))
    ids = draw(st.lists(st.integers(-1, 1), min_size=tokens * top_k, max_size=tokens * top_k))
    here = draw(st.lists(st.booleans(), min_size=2, max_size=2))
    ids = torch.tensor(ids).view(tokens, top_k)
    table = torch.where(torch.tensor(here), layer.table, -1).int()
    x = random(tokens, layer.shape.hidden).bfloat16()
    absent = (ids >= 0) & ~torch.tensor(here)[ids.clamp(min=0)]
    assert torch.equal(layer.on_device(x, ids, table), layer.on_cpu(x, ids.where(~absent, -1)))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, in the interpreter
@pytest.mark.parametrize("form", FORMS)
def test_an_activation_that_is_no_number_spoils_its_row_and_no_other(form):
    layer = Layer(form, 32, 32, count=1)
    x, ids = random(3, 32).bfloat16(), torch.zeros(3, 1, dtype=torch.int64)
    clean = layer.on_device(x, ids)
    x[0, 20], x[2, 3] = float("nan"), float("inf")
    spoilt = layer.on_device(x, ids)
    assert spoilt[::2].isnan().all()
    assert torch.equal(spoilt[1], clean[1])


@pytest.mark.parametrize("form", ["q4", "bf16", "f32"])
def test_experts_named_by_slots_fill_their_places(form):
    """The interface of SlotMath; torch computes many rows of one expert in bf16, and all f32."""
    if form == "f32":
        shape = ExpertLayout(32, 24, "F32")
        weights = [random(48, 32, seed=1) / 6, random(32, 24, seed=2) / 6]
        raw = torch.cat([w.flatten() for w in weights]).view(torch.uint8)
        arena = torch.zeros(2, shape.slot_bytes, dtype=torch.uint8)
        arena[1, : len(raw)] = raw
        math, x = DeviceMath(shape, arena.to(DEVICE), TorchMath()), random(18, 32)
        wanted = TorchMath().ffn(x, *weights)
    else:
        layer = Layer(form, 32, 24, count=2)
        math, x = layer.math, random(18, 32).bfloat16()
        wanted = layer.on_cpu(x, torch.zeros(18, 1, dtype=torch.int64))
    places = [place for place in range(18) if place != 4]
    rows = torch.full((18, 32), UNTOUCHED, dtype=x.dtype, device=DEVICE)
    math.run(x.to(DEVICE), [(1, places)], 1, rows)
    rows = rows.cpu()
    assert (rows[4] == UNTOUCHED).all()
    if form == "q4":
        assert torch.equal(rows[places], wanted[places])
    else:
        torch.testing.assert_close(rows[places], wanted[places], rtol=0.02, atol=1e-3)


def test_combining_gives_the_cpus_bits():
    layer = Layer("q4", 32, 24, count=1)
    rows, weights = random(3, 4, 600).bfloat16(), random(3, 4, seed=7)
    out = torch.empty(3, 600, dtype=torch.bfloat16)
    combine_rows(rows.data_ptr(), weights.data_ptr(), 3, 4, 600, out.data_ptr(), False)
    found = layer.math.combine(rows.to(DEVICE), weights.to(DEVICE))
    assert torch.equal(found.cpu(), out)
