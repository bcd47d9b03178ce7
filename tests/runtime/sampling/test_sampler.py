"""Token sampling: every option against values by hand, and the generator's numbers."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import GenerationConfig

from moeinf.runtime.sampling.sampler import Random, Sampler, SamplingOptions, model_defaults

NOTHING = SamplingOptions()
PLAIN = SamplingOptions(
    temperature=1, top_k=0, top_p=1, min_p=0, repeat_penalty=1, repeat_last_n=64, seed=5
)


def shares(
    options: SamplingOptions, logits: list[float], history: list[int] | None = None
) -> dict[int, float]:
    """Return each token's share of 4,000 draws."""
    sampler = Sampler(options, NOTHING)
    values = np.array(logits, np.float32)
    counts = Counter(sampler.choose(values, history or []) for _ in range(4000))
    return {token: count / 4000 for token, count in sorted(counts.items())}


def test_splitmix64_reference_values() -> None:
    """The first outputs for seed 1234567, as published with the algorithm's reference code."""
    random = Random(1234567)
    published = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    assert [random.uniform() for _ in published] == [(n >> 11) / 2**53 for n in published]


def test_greedy_takes_the_first_of_the_largest() -> None:
    sampler = Sampler(SamplingOptions(temperature=0), NOTHING)
    assert sampler.choose(np.array([1, 7, 7, 3], np.float32), [1, 1, 1]) == 1


def test_greedy_ignores_default_penalties_but_not_asked_for_ones() -> None:
    logits, history = np.array([2.0, 1.9, 0.0], np.float32), [0, 0]
    assert Sampler(SamplingOptions(temperature=0), NOTHING).choose(logits, history) == 0
    asked = SamplingOptions(temperature=0, repeat_penalty=1.1)
    assert Sampler(asked, NOTHING).choose(logits, history) == 1
    assert (
        Sampler(SamplingOptions(temperature=0), SamplingOptions(repeat_penalty=1.1)).choose(
            logits, history
        )
        == 1
    )


def test_plain_draws_follow_softmax() -> None:
    found = shares(PLAIN, [np.log(0.5), np.log(0.3), np.log(0.2)])
    assert found == pytest.approx({0: 0.5, 1: 0.3, 2: 0.2}, abs=0.03)


def test_temperature_sharpens() -> None:
    options = SamplingOptions(temperature=0.5).over(PLAIN)
    found = shares(options, [np.log(0.8), np.log(0.2)])
    assert found[1] == pytest.approx(0.04 / 0.68, abs=0.02)


def test_top_k_keeps_k() -> None:
    assert set(shares(SamplingOptions(top_k=2).over(PLAIN), [0, 1, 2, 1.5])) == {2, 3}
    assert set(shares(SamplingOptions(top_k=1).over(PLAIN), [1, 1, 1])) == {0}


def test_top_p_keeps_the_smallest_set_that_reaches_the_mass() -> None:
    logits = [np.log(p) for p in (0.5, 0.3, 0.15, 0.05)]
    assert set(shares(SamplingOptions(top_p=0.79).over(PLAIN), logits)) == {0, 1}
    assert set(shares(SamplingOptions(top_p=0.81).over(PLAIN), logits)) == {0, 1, 2}
    assert set(shares(SamplingOptions(top_p=0.0).over(PLAIN), logits)) == {0}


def test_min_p_is_relative_to_the_best() -> None:
    logits = [np.log(p) for p in (0.5, 0.3, 0.15, 0.05)]
    assert set(shares(SamplingOptions(min_p=0.25).over(PLAIN), logits)) == {0, 1, 2}


def test_penalties() -> None:
    """Repeat divides positive and multiplies negative logits; then presence and frequency."""
    options = SamplingOptions(
        temperature=0, repeat_penalty=2, presence_penalty=0.5, frequency_penalty=0.25
    )
    sampler = Sampler(options, NOTHING)
    # token 0: 4/2 - .5 - 3·.25 = .75; token 1: -1·2 - .5 - .25 = -2.75; token 2 untouched
    history = [0, 0, 0, 1]
    assert sampler.choose(np.array([4, -1, 0.74], np.float32), history) == 0
    assert sampler.choose(np.array([4, -1, 0.76], np.float32), history) == 2
    assert sampler.choose(np.array([-9, -1, -2.74], np.float32), history) == 2
    assert sampler.choose(np.array([-9, -1, -2.76], np.float32), history) == 1


def test_repeat_window() -> None:
    options = SamplingOptions(temperature=0, repeat_penalty=10, repeat_last_n=2)
    logits = np.array([3, 2, 1], np.float32)
    assert Sampler(options, NOTHING).choose(logits, [0, 2, 2]) == 0
    whole = SamplingOptions(temperature=0, repeat_penalty=10, repeat_last_n=-1)
    assert Sampler(whole, NOTHING).choose(logits, [0, 2, 2]) == 1


def test_same_seed_same_choices() -> None:
    logits = np.random.default_rng(0).normal(size=1000).astype(np.float32)
    runs = []
    for seed in (7, 7, 8):
        sampler = Sampler(SamplingOptions(seed=seed), NOTHING)
        runs.append([sampler.choose(logits, []) for _ in range(50)])
    assert runs[0] == runs[1] != runs[2]


def test_the_seed_is_told_when_none_was_given() -> None:
    first, second = Sampler(NOTHING, NOTHING), Sampler(NOTHING, NOTHING)
    assert first.options.seed is not None
    assert first.options.seed != second.options.seed


def written(folder: Path, said: object) -> SamplingOptions:
    """Return a model's default sampling options with this generation_config."""
    (folder / "generation_config.json").write_text(json.dumps(said))
    return Sampler(SamplingOptions(), model_defaults(folder)).options


def test_model_defaults_and_their_place(tmp_path: Path) -> None:
    said = {
        "do_sample": True,
        "temperature": 0.6,
        "top_k": 20,
        "top_p": "high",
        "repetition_penalty": 1.2,
        "min_p": -1,
    }
    (tmp_path / "generation_config.json").write_text(json.dumps(said))
    model = model_defaults(tmp_path)
    assert model == SamplingOptions(
        temperature=0.6, top_k=20, top_p=1, min_p=0, repeat_penalty=1.2, repeat_last_n=-1
    )
    chosen = Sampler(SamplingOptions(top_k=3), model).options
    assert (chosen.temperature, chosen.top_k, chosen.top_p) == (0.6, 3, 1)
    (tmp_path / "generation_config.json").write_text('{"do_sample": false, "temperature": 0.6}')
    assert model_defaults(tmp_path).temperature == 0
    (tmp_path / "generation_config.json").write_text("[1]")
    assert model_defaults(tmp_path) == NOTHING


@pytest.mark.parametrize(
    "said",
    [
        {},
        {"do_sample": True},
        {"do_sample": None, "temperature": 0.7},
        {"do_sample": True, "temperature": 0.6, "top_p": 0.95},
        {"do_sample": True, "top_k": None, "repetition_penalty": 1.05},
        {"do_sample": True, "top_k": 20, "min_p": 0.1},
        {"eos_token_id": 2, "pad_token_id": 0},
    ],
)
def test_what_a_generation_config_leaves_out_is_as_in_transformers(
    said: dict[str, object], tmp_path: Path
) -> None:
    found = written(tmp_path, said)
    theirs = GenerationConfig.from_pretrained(tmp_path).to_dict()
    filled = {
        key: default if theirs.get(key) is None else theirs[key]
        for key, default in GenerationConfig._get_default_generation_params().items()
    }
    assert found.temperature == (filled["temperature"] if filled["do_sample"] else 0)
    assert (found.top_k, found.top_p) == (filled["top_k"], filled["top_p"])
    assert found.min_p == (theirs.get("min_p") or 0)
    assert found.repeat_penalty == filled["repetition_penalty"]


def test_without_a_generation_config_the_defaults_are_ollamas(tmp_path: Path) -> None:
    found = Sampler(SamplingOptions(), model_defaults(tmp_path)).options
    assert (found.temperature, found.top_k, found.top_p) == (0.8, 40, 0.9)
    assert (found.repeat_penalty, found.repeat_last_n) == (1.1, 64)


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": -0.1},
        {"top_p": 1.1},
        {"top_k": -1},
        {"min_p": 2},
        {"temperature": float("nan")},
    ],
)
def test_values_that_cannot_be(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        SamplingOptions(**wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("vocab", [50, 700, 20_000])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_shortlist_chooses_like_the_whole_vocabulary(vocab: int, temperature: float) -> None:
    """Penalties move tokens into and out of the shortlist; many logits are equal."""
    draw = np.random.default_rng(vocab)
    for seed in range(40):
        logits = draw.normal(0, 2, vocab).round(1).astype(np.float32)
        ends = [int(logits.argmax()), int(logits.argmin())]
        history = [*draw.integers(0, vocab, 30).tolist(), *ends]
        options = SamplingOptions(
            temperature=temperature,
            top_k=12,
            top_p=0.95,
            repeat_penalty=1.3,
            repeat_last_n=-1,
            presence_penalty=float(draw.normal()),
            frequency_penalty=float(draw.normal() * 4),
            seed=seed,
        )
        chosen = Sampler(options, NOTHING).choose(logits, history)
        scores = logits.astype(np.float64)
        for token in set(history):
            before = scores[token]
            scores[token] = before / 1.3 if before > 0 else before * 1.3
            scores[token] -= options.presence_penalty or 0.0
            scores[token] -= (options.frequency_penalty or 0.0) * history.count(token)
        best = np.argsort(-scores, kind="stable")
        if temperature == 0:
            assert chosen == best[0]
            continue
        # The other options reduce a draw of the whole vocabulary to this order.
        left = SamplingOptions(temperature=1, top_k=0, top_p=0.95, repeat_penalty=1, seed=seed)
        same = Sampler(left, NOTHING).choose(scores[best[:12]], [])
        assert chosen == best[same]


def chosen_by_formula(options: SamplingOptions, logits: np.ndarray, history: list[int]) -> int:
    """Choose at temperature 0, from all logits and the whole window at once."""
    last = 64 if options.repeat_last_n is None else options.repeat_last_n
    recent = history if last < 0 else history[max(0, len(history) - last) :]
    scores = logits.astype(np.float64)
    if recent:
        found, counts = np.unique(recent, return_counts=True)
        repeat, before = options.repeat_penalty or 1.0, scores[found]
        after = np.where(before > 0, before / repeat, before * repeat)
        frequency = (options.frequency_penalty or 0.0) * counts
        scores[found] = after - (options.presence_penalty or 0.0) - frequency
    return int(scores.argmax())


@given(
    st.lists(st.integers(0, 199), max_size=40),
    st.sampled_from([-1, 0, 1, 5, 64]),
    st.sampled_from([0.5, 1.0, 1.3]),
    st.sampled_from([-1.0, 0.0, 0.5]),
    st.sampled_from([-0.5, 0.0, 0.25]),
    st.integers(0, 2**32 - 1),
)
def test_counts_that_grow_choose_like_all_tokens_counted_again(
    history: list[int], last: int, repeat: float, presence: float, frequency: float, seed: int
) -> None:
    options = SamplingOptions(
        temperature=0,
        repeat_penalty=repeat,
        repeat_last_n=last,
        presence_penalty=presence,
        frequency_penalty=frequency,
    )
    draw = np.random.default_rng(seed)
    sampler = Sampler(options, NOTHING)
    for _ in range(20):
        logits = draw.normal(0, 2, 200).round(1).astype(np.float32)
        token = sampler.choose(logits, history)
        assert token == chosen_by_formula(options, logits, history)
        history.append(token)
    other = draw.integers(0, 200, len(history)).tolist()
    assert sampler.choose(logits, other) == chosen_by_formula(options, logits, other)


class Counted(Sequence[int]):
    """A history that counts how many of its tokens are read."""

    def __init__(self, tokens: list[int]) -> None:
        self.tokens = tokens
        self.read = 0

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, place: Any) -> Any:
        found = self.tokens[place]
        self.read += len(found) if isinstance(place, slice) else 1
        return found


@pytest.mark.parametrize("length", [1000, 32_000])
@pytest.mark.parametrize("last", [-1, 500])
def test_a_token_costs_the_same_after_any_history(length: int, last: int) -> None:
    options = SamplingOptions(temperature=1, top_k=50, repeat_penalty=1.1, repeat_last_n=last)
    draw = np.random.default_rng(length)
    logits = draw.normal(size=2000).astype(np.float32)
    history = Counted(draw.integers(0, 2000, length).tolist())
    sampler = Sampler(options, NOTHING)
    history.tokens.append(sampler.choose(logits, history))
    history.read = 0
    for _ in range(10):
        history.tokens.append(sampler.choose(logits, history))
    assert history.read == (10 if last < 0 else 20)
