"""Grouping, combining and the resident reference, against plain loops."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from moeinf.models.base import Activation
from moeinf.models.layers.ffn import expert_ffn
from moeinf.models.layers.moe import ResidentExperts, SparseFfn, TorchMath, combine, group


@given(
    st.integers(1, 5).flatmap(
        lambda k: st.lists(st.lists(st.integers(-1, 6), min_size=k, max_size=k))
    )
)
def test_groups(rows: list[list[int]]) -> None:
    k = len(rows[0]) if rows else 1
    flat = [expert for row in rows for expert in row]
    found = group(torch.tensor(flat, dtype=torch.int64).view(len(rows), k), 7)
    expected = {e: [i for i, x in enumerate(flat) if x == e] for e in sorted(set(flat) - {-1})}
    assert dict(found) == expected
    assert [expert for expert, _ in found] == sorted(expected)


@pytest.mark.parametrize("bad", [-2, 7])
def test_ids_out_of_range(bad: int) -> None:
    with pytest.raises(ValueError, match="must lie in 0 … 6"):
        group(torch.tensor([[0, bad]]), 7)


def test_combine_adds_in_order_in_float32() -> None:
    """In bfloat16 1 + 1/512 + … stays 1; in float32 the four small ones add up."""
    rows = torch.ones(1, 5, 3, dtype=torch.bfloat16)
    weights = torch.tensor([[1.0, *[2.0**-9] * 4]])
    assert combine(rows, weights).tolist() == [[1.0078125] * 3]
    assert combine(rows, weights).dtype == torch.bfloat16


def test_a_row_does_not_depend_on_its_company() -> None:
    torch.manual_seed(0)
    rows, weights = torch.randn(9, 4, 37), torch.rand(9, 4)
    together = combine(rows, weights)
    for t in range(9):
        assert torch.equal(combine(rows[t : t + 1], weights[t : t + 1])[0], together[t])


def make_experts(
    count: int, hidden: int, wide: int
) -> dict[tuple[int, int], tuple[Tensor, Tensor]]:
    torch.manual_seed(1)
    return {
        (layer, expert): (torch.randn(2 * wide, hidden), torch.randn(hidden, wide))
        for layer in range(2)
        for expert in range(count)
    }


@pytest.mark.parametrize(
    "activation", ["clamped_swiglu", "limited_swiglu", "geglu", "relu", "relu2"]
)
def test_activations_with_biases(activation: Activation) -> None:
    draw = torch.Generator().manual_seed(3)
    inner_rows = 5 if activation in ("relu", "relu2") else 10
    inner, down, inner_bias, down_bias, x = (
        torch.randn(shape, generator=draw, dtype=torch.float64) * 5
        for shape in ((inner_rows, 4), (4, 5), (inner_rows,), (4,), (70, 4))
    )
    products = x @ inner.T + inner_bias
    if activation == "relu":
        middle = products * (products > 0)
    elif activation == "geglu":
        gate = products[:, :5]
        tanh = torch.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3))
        middle = 0.5 * gate * (1 + tanh) * products[:, 5:]
    elif activation == "relu2":
        middle = products.abs() * products * (products > 0)
    elif activation == "limited_swiglu":
        gate = torch.where(products[:, :5] > 10, 10.0, products[:, :5])
        up = torch.where(products[:, 5:].abs() > 10, 10 * products[:, 5:].sign(), products[:, 5:])
        middle = up * gate / (1 + torch.exp(-gate))
    else:
        gate = torch.where(products[:, :5] > 7, 7.0, products[:, :5])
        up = torch.where(products[:, 5:].abs() > 7, 7 * products[:, 5:].sign(), products[:, 5:])
        middle = (up + 1) * gate / (1 + torch.exp(-1.702 * gate))
    expected = middle @ down.T + down_bias
    torch.testing.assert_close(
        expert_ffn(activation, x, inner, down, inner_bias, down_bias), expected
    )


def test_swiglu() -> None:
    x = torch.tensor([[1.0, -2.0]])
    gate_up = torch.tensor([[1.0, 0.0], [0.0, 1.0], [2.0, 0.0], [0.0, 3.0]])  # gates, then ups
    down = torch.tensor([[1.0, 10.0]])
    silu = [1 / (1 + torch.tensor(-1.0).exp()), -2 / (1 + torch.tensor(2.0).exp())]
    expected = silu[0] * 2 + 10 * silu[1] * -6
    torch.testing.assert_close(expert_ffn("swiglu", x, gate_up, down), expected.view(1, 1))


def test_resident_experts() -> None:
    weights = make_experts(5, hidden=6, wide=4)
    experts = ResidentExperts(weights)
    x = torch.randn(4, 6)
    ids = torch.tensor([[0, 3], [3, 3], [-1, 1], [-1, -1]])
    mix = torch.rand(4, 2)
    before = [x.clone(), ids.clone(), mix.clone()]
    experts.begin_pass(torch.zeros(4, dtype=torch.int64), "prefill")
    out = experts.submit(1, x, ids, mix).result()
    experts.end_pass()
    expected = torch.zeros(4, 6)
    for t in range(4):
        for k in range(2):
            if ids[t, k] >= 0:
                gate_up, down = weights[1, int(ids[t, k])]
                expected[t] += mix[t, k] * expert_ffn("swiglu", x[t : t + 1], gate_up, down)[0]
    torch.testing.assert_close(out, expected)
    assert out[3].tolist() == [0.0] * 6
    assert all(torch.equal(a, b) for a, b in zip(before, (x, ids, mix), strict=True))


def test_shared_experts_run_between_submit_and_result() -> None:
    events: list[str] = []

    class Slow:
        def submit(self, layer: int, x: Tensor, ids: Tensor, weights: Tensor) -> Slow:
            events.append(f"submit {layer}")
            return self

        def result(self) -> Tensor:
            events.append("result")
            return torch.ones(2, 3)

    def shared(x: Tensor) -> Tensor:
        events.append("shared")
        return x

    def router(x: Tensor) -> tuple[Tensor, Tensor]:
        return torch.zeros(2, 1, dtype=torch.int64), torch.ones(2, 1)

    out = SparseFfn(4, router, shared)(torch.ones(2, 3), Slow())  # type: ignore[arg-type]
    assert events == ["submit 4", "shared", "result"]
    assert out.tolist() == [[2.0] * 3] * 2


def test_math_object() -> None:
    math, x = TorchMath(), torch.ones(1, 2)
    assert [e for e, _ in group(torch.tensor([[1, 0]]), 2)] == [0, 1]
    assert math.ffn(x, torch.ones(2, 2), torch.ones(2, 1)).shape == (1, 2)
    assert math.combine(torch.ones(1, 2, 3), torch.ones(1, 2)).tolist() == [[2.0] * 3]
