"""Compare routers on the device with torch's.

Without a GPU, Triton's interpreter runs the kernels (tests/conftest.py).
"""

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton", reason="Triton is built for Linux only")

from moeinf.offload.gpu_kernels import router
from moeinf.offload.gpu_kernels.router import route
from moeinf.offload.gpu_kernels.router_spec import RouterKind
from tests.fake_device import torch_router
from tests.offload.device import DEVICE

pytestmark = pytest.mark.kernel("small")

BF16, F32 = torch.bfloat16, torch.float32

KINDS = {  # experts, kind
    "softmax": (12, RouterKind("softmax", 4)),
    "one expert": (1, RouterKind("softmax", 1)),
    "all of them": (5, RouterKind("softmax", 5, True)),
    "scaled": (9, RouterKind("softmax", 3, True, 2.5)),
    "groups": (20, RouterKind("softmax", 3, False, 16.0, (4, 2))),
    "three groups": (15, RouterKind("softmax", 2, True, 1.0, (3, 1))),
    "top softmax": (10, RouterKind("top_softmax", 3)),
    "sigmoid": (12, RouterKind("sigmoid", 4, True, 2.5)),
    "sigmoid, groups": (18, RouterKind("sigmoid", 5, True, 2.5, (6, 3))),
    "sigmoid, as they are": (8, RouterKind("sigmoid", 3, False, 1.0, (2, 1))),
    "mixer": (16, RouterKind("mixer", 2, jitter=0.01)),
    "mixer, far": (7, RouterKind("mixer", 2, jitter=0.4)),
}


def routed(x, weight, kind, bias=None):
    given = None if bias is None else bias.to(DEVICE)
    ids, weights = route(x.to(DEVICE), weight.to(DEVICE), kind, given)
    assert (ids.dtype, weights.dtype) == (torch.int64, F32)
    return ids.cpu(), weights.cpu()


def drawn(name, rows=3, width=50, dtype=BF16, seed=0):
    experts, kind = KINDS[name]
    draw = torch.Generator().manual_seed(seed)
    x, weight = (
        torch.randn(rows, width, generator=draw),
        torch.randn(experts, width, generator=draw),
    )
    bias = None
    if kind.score in ("sigmoid", "top_softmax"):
        bias = torch.randn(experts, generator=draw)
    return x.to(dtype), (weight / width**0.5).to(dtype), kind, bias


@pytest.mark.parametrize("name", KINDS)
def test_every_kind_like_torch(name):
    x, weight, kind, bias = drawn(name)
    ids, weights = routed(x, weight, kind, bias)
    wanted_ids, wanted = torch_router(kind, weight, bias)(x)
    assert torch.equal(ids, wanted_ids)
    torch.testing.assert_close(weights, wanted, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("name", ["groups", "sigmoid, groups", "mixer"])
@pytest.mark.parametrize("types", [(F32, F32), (BF16, F32), (F32, BF16)], ids=str)
def test_types_and_rows_in_pieces(name, types, monkeypatch):
    monkeypatch.setattr(router, "_PIECE", 32)
    x, weight, kind, bias = drawn(name, rows=5, width=90, dtype=F32, seed=3)
    x, weight = x.to(types[0]), weight.to(types[1])
    ids, weights = routed(x, weight, kind, bias)
    wanted_ids, wanted = torch_router(kind, weight, bias)(x)
    assert torch.equal(ids, wanted_ids)
    torch.testing.assert_close(weights, wanted, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("name", ["softmax", "top softmax", "sigmoid", "mixer"])
def test_of_equals_the_first(name):
    x, weight, kind, bias = drawn(name, rows=2)
    if bias is not None:
        bias = torch.zeros_like(bias)
    ids, weights = routed(x, torch.ones_like(weight), kind, bias)
    assert ids.tolist() == [list(range(kind.top_k))] * 2
    expected = {"softmax": 1 / 12, "top softmax": 1 / 3, "sigmoid": 2.5 / 4}
    if name in expected:
        torch.testing.assert_close(weights, torch.full_like(weights, expected[name]))
    else:  # 1 of 16, then of 15
        torch.testing.assert_close(weights, torch.tensor([[1 / 16, 1 / 15]] * 2))


@pytest.mark.parametrize("name", ["groups", "sigmoid, groups"])
def test_of_equal_groups_the_first(name):
    x, weight, kind, bias = drawn(name, rows=1)
    weight = torch.zeros_like(weight)
    if bias is not None:
        bias = torch.zeros_like(bias)
    ids, _ = routed(x, weight, kind, bias)
    assert ids.tolist() == [list(range(kind.top_k))]


def test_scores_of_0_are_of_equals_the_first_too():
    """A score in the best group underflows to 0, so a score outside may be chosen, as in torch."""
    x = torch.tensor([[1.0]])
    weight = torch.tensor([[-300.0], [-200.0], [200.0], [-300.0]])
    ids, weights = routed(x, weight, RouterKind("softmax", 2, False, 1.0, (2, 1)))
    assert ids.tolist() == [[2, 0]]
    assert weights.tolist() == [[1.0, 0.0]]


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # the interpreter's numpy
@pytest.mark.filterwarnings("ignore:All-NaN slice:RuntimeWarning")
@pytest.mark.parametrize("name", KINDS)
def test_nan_chooses_experts_that_exist_and_stays(name):
    x, weight, kind, bias = drawn(name, rows=2)
    x[0, 5] = torch.nan
    ids, weights = routed(x, weight, kind, bias)
    assert sorted(set(ids[0].tolist())) == sorted(ids[0].tolist())
    assert 0 <= int(ids.min()) <= int(ids.max()) < len(weight)
    assert bool(weights[0].isnan().all())
    alone_ids, alone = routed(x[1:], weight, kind, bias)
    assert torch.equal(ids[1:], alone_ids)
    assert torch.equal(weights[1:], alone)


def test_one_expert_that_is_nan_is_chosen_last():
    x, weight, kind, bias = drawn("top softmax")
    ids, _ = routed(x, weight, kind, bias)
    weight[ids[0, 0]] = torch.nan
    found, weights = routed(x[:1], weight, replace(kind, top_k=9), bias)
    assert int(ids[0, 0]) not in found[0].tolist()
    assert not bool(weights.isnan().any())
