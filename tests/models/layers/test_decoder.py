"""Test `extend`: invalid arguments, the state after a failed pass, the calls to experts."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from moeinf.models.base import ContextFull
from tests.fakes import WatchedExperts
from tests.models.conftest import Pair

Make = Callable[[str], Pair]


@pytest.fixture
def olmoe(make_pair: Make) -> Pair:
    return make_pair("olmoe")


def test_context_full_before_anything_is_computed(olmoe: Pair) -> None:
    model, experts = olmoe.ours.model, WatchedExperts(olmoe.ours.experts)
    state, other = model.new_state(4), model.new_state(4)
    model.extend([([1, 2, 3], state)], experts)
    with pytest.raises(ContextFull, match="2 more tokens after 3 do not fit into a context of 4"):
        model.extend([([1], other), ([1, 2], state)], experts)
    assert (state.length, other.length, len(experts.passes)) == (3, 0, 1)
    model.extend([([1], state)], experts)
    assert state.length == state.capacity


@pytest.mark.parametrize("ids", [[97], [-1], [3, 1 << 70], []])
def test_bad_ids(olmoe: Pair, ids: list[int]) -> None:
    model, experts = olmoe.ours.model, WatchedExperts(olmoe.ours.experts)
    with pytest.raises(ValueError, match="token"):
        model.extend([(ids, model.new_state(4))], experts)
    assert experts.passes == []


def test_bad_batches(olmoe: Pair, make_pair: Make) -> None:
    model, experts = olmoe.ours.model, olmoe.ours.experts
    state, foreign = model.new_state(4), make_pair("mixtral").ours.model.new_state(4)
    for batch, problem in (
        ([], "empty batch"),
        ([([1], state), ([1], state)], "twice"),
        ([([1], foreign)], "not made by this model"),
    ):
        with pytest.raises(ValueError, match=problem):
            model.extend(batch, experts)  # type: ignore[arg-type]
    for capacity in (0, 129):
        with pytest.raises(ValueError, match=f"context must be .* got {capacity}"):
            model.new_state(capacity)


def test_a_failed_pass_leaves_every_length(olmoe: Pair) -> None:
    model = olmoe.ours.model
    experts = WatchedExperts(olmoe.ours.experts)
    states = [model.new_state(60), model.new_state(60)]
    model.extend([(olmoe.ids[:6], states[0])], experts)
    experts.fail_in = 1  # the second layer
    with pytest.raises(RuntimeError, match="gone"):
        model.extend([(olmoe.ids[6:9], states[0]), ([5], states[1])], experts)
    assert [s.length for s in states] == [6, 0]
    assert experts.passes[-1].accepted == [False] * 4  # so the rows do not become history
    experts.fail_in = None
    olmoe.assert_close(model.extend([(olmoe.ids[6:9], states[0])], experts, "all"), 6)
    assert experts.passes[-1].accepted is None


def test_rows_and_phase(olmoe: Pair) -> None:
    model, experts = olmoe.ours.model, WatchedExperts(olmoe.ours.experts)
    a, b = model.new_state(9), model.new_state(9)
    b.request = 1
    model.extend([([1, 2], a), ([3], b)], experts)
    model.extend([([1], a), ([3], b)], experts)
    model.extend([([1], a), ([3, 4], b)], experts)
    model.extend([([1], model.new_state(9))], experts)  # one token without history
    assert [(p.rows, p.phase) for p in experts.passes] == [
        ([0, 0, 1], "prefill"),
        ([0, 1], "decode"),
        ([0, 1, 1], "prefill"),
        ([0], "prefill"),
    ]


def test_logits_belong_to_the_caller(olmoe: Pair) -> None:
    """A sampler may write into them, outside of inference mode."""
    model = olmoe.ours.model
    logits = model.extend([([1, 2], model.new_state(4))], olmoe.ours.experts)
    logits[0, 0] = float("-inf")
    assert not logits.is_inference()
    assert logits.shape == (1, model.vocab_size)


def test_many_rows_of_logits(olmoe: Pair) -> None:
    """Compute more rows than fit in one block."""
    model, ids = olmoe.ours.model, [*olmoe.ids, *olmoe.ids]
    logits = model.extend([(ids, model.new_state(128))], olmoe.ours.experts, "all")
    assert logits.shape == (120, 97)
    last = model.extend([(ids, model.new_state(128))], olmoe.ours.experts)
    torch.testing.assert_close(last[0], logits[-1])


@pytest.mark.parametrize(
    ("name", "items"),
    [
        ("mixtral", 2 * 2 * 2 * 12),
        ("olmoe", 2 * 2 * 4 * 8),
        ("deepseek-lite", 3 * (20 + 8)),
        ("deepseek-v3", 3 * (20 + 8)),
        ("deepseek-v4", 4 * 20 + 2 * (20 + 12) // 4 + 3),  # rounded up from 2.5
        ("glm4", 3 * 2 * 2 * 12),
        ("arctic", 2 * 2 * 2 * 8),
        ("gpt-oss", 3 * 2 * 2 * 10),
        ("granite", 2 * 2 * 2 * 8),
        ("phimoe", 2 * 2 * 2 * 12),
        ("glm4-lite", 3 * (20 + 8)),
        ("v32", 3 * (20 + 8 + 14)),  # with the indexers' keys
        ("glm-dsa", 4 * (20 + 8) + 3 * 14),  # one layer of four has no indexer
        ("glm5-next", 20 + 2 * 14),  # one layer of four, with the indexer's keys and gates
        ("qwen2-window", 4 * 2 * 3 * 12),
        ("qwen3", 2 * 2 * 2 * 12),
        ("kimi-linear", 1 * (20 + 8)),  # one layer of four has attention
        ("mimo", (1 + 2 + 1) * (12 + 10)),  # the middle layer has two key heads
        ("qwen3.5", 1 * 2 * 1 * 16),  # one layer of four has attention
        ("gemma4", 2 * 2 * 12 + 2 * 2 * 1 * 16),  # a layer with a window, and two global ones
        ("granite-hybrid", 1 * 2 * 2 * 8),
        ("nemotron", 1 * 2 * 2 * 12),
        ("dots1", 3 * 2 * 2 * 12),
        ("ernie4.5", 3 * 2 * 2 * 6),
        ("exaone", 3 * 2 * 2 * 12),
        ("granite-shared", 2 * 2 * 2 * 8),
        ("hunyuan", 2 * 2 * 2 * 12),
        ("laguna", 3 * 2 * 2 * 12),
        ("lfm2", 1 * 2 * 2 * 6),  # one layer of four has attention
        ("minimax-m2", 2 * 2 * 2 * 12),
        ("mistral4", 3 * (20 + 8)),
        ("qwen3-next", 1 * 2 * 1 * 16),
        ("solar", 2 * 2 * 2 * 12),
    ],
)
def test_kv_bytes_per_token(make_pair: Make, name: str, items: int) -> None:
    assert make_pair(name).ours.model.kv_bytes_per_token == items * 4
