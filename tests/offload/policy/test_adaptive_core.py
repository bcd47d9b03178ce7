"""The native core of `adaptive` decides exactly as its plain transcription does."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moeinf.native import AdaptiveCore
from moeinf.offload.policy.adaptive import AdaptiveKnobs
from moeinf.offload.routing.hint_model import ModelledHints
from moeinf.offload.routing.route_csv import read_route_csv
from tests.offload.policy.plain import PlainAdaptive, PlainUsage

TRACES = Path(__file__).parents[2] / "data" / "traces"


def core(
    layers: int, experts: int, keep_at_most: int, knobs: AdaptiveKnobs, encoder_layers: int = 0
) -> AdaptiveCore:
    return AdaptiveCore(
        layers,
        experts,
        keep_at_most,
        hysteresis=knobs.hysteresis,
        worth=knobs.worth,
        sure=knobs.sure,
        decays=knobs.decays,
        step=knobs.step,
        prompt=knobs.prompt,
        encoder_layers=encoder_layers,
    )


class Pair:
    """Both cores behind one small cache; every answer is compared on the way."""

    def __init__(
        self,
        layers: int,
        experts: int,
        slots: int,
        knobs: AdaptiveKnobs,
        encoder_layers: int = 0,
    ) -> None:
        keep = max(0, slots - max(1, slots // 4))
        self.experts, self.slots = experts, slots
        self.encoder_layers = encoder_layers
        self.native = core(layers, experts, keep, knobs, encoder_layers)
        self.plain = PlainAdaptive(layers, experts, keep, knobs, encoder_layers)
        self.resident: set[int] = set()

    def token(self, ids: np.ndarray, hints: np.ndarray | None, decode: bool, age: int) -> None:
        """Run one pass of ids [L, T, K], with the misses and prefetches of an engine.

        A prompt has two passes where there is an encoder.
        """
        split = self.encoder_layers
        if decode or not split:
            for policy in (self.native, self.plain):
                policy.begin_decode(age) if decode else policy.begin_prefill()
            self.layers(ids, hints, split)
            return
        for policy in (self.native, self.plain):
            policy.begin_encode()
        self.layers(ids[:split], hints, 0)
        for policy in (self.native, self.plain):
            policy.begin_prefill()
        self.layers(ids, hints, split)

    def layers(self, ids: np.ndarray, hints: np.ndarray | None, first: int) -> None:
        """Run the layers of one pass, from `first` on."""
        for layer, chosen in list(enumerate(ids))[first:]:
            self.native.routed(layer, chosen)
            self.plain.routed(layer, chosen)
            if hints is not None and layer + 1 < len(ids):
                self.native.hinted(layer + 1, hints[layer + 1])
                self.plain.hinted(layer + 1, hints[layer + 1])
            cells = {layer * self.experts + int(e) for e in chosen.ravel() if e >= 0}
            for cell in sorted(cells - self.resident):
                self.fetch(cell, cells)
            prefetches = self.native.wishes(6)
            assert prefetches == self.plain.wishes(6)
            for cell, _urgent, _probability in prefetches[:2]:
                self.fetch(cell, cells)
            if layer == 1 and self.resident:  # a read that has failed
                for policy in (self.native, self.plain):
                    policy.forget(min(self.resident))
                self.resident.remove(min(self.resident))
            assert self.native.insertions == self.plain.insertions
        for policy in (self.native, self.plain):
            policy.end_pass()
        assert np.array_equal(self.native.score, self.plain.usage.score)
        assert self.native.weights == self.plain.usage.weights_by_age[self.plain.usage.age]

    def fetch(self, cell: int, pinned: set[int]) -> None:
        assert self.native.keeps(cell) == self.plain.keeps(cell)
        if len(self.resident) >= self.slots:
            victim = self.native.victim(lambda c: c not in pinned)
            assert victim == self.plain.victim(lambda c: c not in pinned)
            if victim is None:
                return
            self.resident.remove(victim)
        self.resident.add(cell)
        self.native.admitted(cell)
        self.plain.admitted(cell)


KNOBS = st.builds(
    AdaptiveKnobs,
    hysteresis=st.sampled_from((0.0, 0.25, 1.0)),
    worth=st.sampled_from((0.0, 0.25, 0.9)),
    decays=st.sampled_from(((0.5,), (0.8, 0.95, 0.98))),
    sure=st.sampled_from((0.1, 0.5, 2.0)),
    step=st.sampled_from((0.0, 0.05, 0.5)),
    prompt=st.sampled_from((0.5, 1.0)),
)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 999), st.integers(1, 20), KNOBS, st.booleans(), st.integers(0, 2))
def test_random_routing(
    seed: int, slots: int, knobs: AdaptiveKnobs, skewed: bool, encoder_layers: int
) -> None:
    """Prefill and decode, one row or several, absent experts, hints right and wrong, the past."""
    layers, experts = 3, 12
    random = np.random.default_rng(seed)
    pair = Pair(layers, experts, slots, knobs, encoder_layers)
    favour = random.dirichlet([0.2 if skewed else 5.0] * experts)
    for step in range(12):
        decode = step % 6 > 0
        rows = int(random.integers(1, 4 if decode else 9))
        shape = (layers, rows, 2)
        ids = random.choice(experts, shape, p=favour).astype(random.choice([np.int16, np.int64]))
        ids[random.random(shape) < 0.1] = -1
        hints = ids.copy() if random.random() < 0.7 else None
        if hints is not None:
            wrong = random.random(shape) < 0.3
            hints[wrong] = random.integers(-1, experts, shape)[wrong]
        past = random.random((layers, experts)).astype(np.float32)
        pair.native.past[:] = past
        pair.plain.past[:] = past
        pair.token(ids, hints, decode, step % 6)


@pytest.mark.parametrize("name", ["qwen3-30b-a3b", "gemma-4-26b-a4b"])
def test_real_traces(name: str) -> None:
    recording = read_route_csv(TRACES / f"{name}.route.csv.gz")
    shape = recording.shape
    gate = ModelledHints(0.8, 0.8, shape.experts)
    pair = Pair(shape.layers, shape.experts, shape.layers * shape.experts // 10, AdaptiveKnobs())
    for age, done in enumerate(recording.passes[:5]):
        pair.token(done.ids, gate.of_pass(done), done.phase == "decode", max(age - 1, 0))


def test_decayed_shares_by_hand() -> None:
    """λ = 1/2: used 0, 0, 1 -> share of 0: .5, .75, .375; of 1: .5. λ = 0: only the last counts."""
    usage = core(1, 3, 1, AdaptiveKnobs(decays=(0.5, 0.0)))
    for chosen in (0, 0, 1):
        usage.begin_decode(9)
        usage.routed(0, np.array([[chosen]]))
    assert usage.share(0) == [0.375, 0.5, 0]
    assert usage.share(1) == [0, 1, 0]


def test_a_prompt_counts_as_tokens() -> None:
    """Two tokens of prompt with λ = 1/2 keep 1/4 of what was: 3/4 of [2/2, 1/2, 0] joins."""
    usage = core(1, 3, 1, AdaptiveKnobs(decays=(0.5,)))
    usage.begin_prefill()
    usage.routed(0, np.array([[0, 1], [0, -1]]))
    assert usage.share(0) == [0.75, 0.375, 0]


def test_the_mixture_and_its_weights_by_hand() -> None:
    """Compare with a count by hand.

    Weights 1/2, 1/2; shares of expert 0: decayed 0, past 1; of expert 1: 0, 0. Score of 0: 1/2.
    Expert 0 comes: the past was all of it. Step max(.2, 1/2) ÷ 1 layer: weights 1/4, 3/4. Then
    the decayed share of 0 is 1/2: score 1/4 · 1/2 + 3/4 · 1 = 7/8.
    """
    usage = core(1, 2, 1, AdaptiveKnobs(decays=(0.5,), step=0.2))
    usage.past[0, 0] = 1
    usage.begin_decode(0)
    assert usage.score.tolist() == [[0.5, 0]]
    usage.routed(0, np.array([[0]]))
    assert usage.weights == [0.25, 0.75]
    assert usage.score.tolist() == [[0.875, 0]]


def test_weights_go_to_the_estimate_that_is_right() -> None:
    """Alternating experts: what was used last is always wrong, the past always half right."""
    usage = core(1, 2, 1, AdaptiveKnobs(decays=(0.0,), step=0.2))
    usage.past[:] = 0.5
    for token in range(60):
        usage.begin_decode(99)
        usage.routed(0, np.array([[token % 2]]))
    last, past = usage.weights
    assert past > 0.95 > 0.05 > last
    assert PlainUsage(1, 2, AdaptiveKnobs()).weights_by_age[0] == [0.25] * 4


@pytest.mark.parametrize(
    ("ids", "error"),
    [
        (np.array([[4]]), IndexError),
        (np.array([1]), ValueError),
        (np.array([[1.0]]), ValueError),
        (np.array([[1]], np.uint8), ValueError),
    ],
)
def test_ids_are_checked(ids: np.ndarray, error: type[Exception]) -> None:
    policy = core(2, 4, 1, AdaptiveKnobs())
    with pytest.raises(error):
        policy.routed(0, ids)
    with pytest.raises(IndexError):
        policy.routed(2, np.array([[1]]))
    with pytest.raises(IndexError):
        policy.admitted(8)
    with pytest.raises(IndexError):
        policy.forget(8)
    with pytest.raises(ValueError, match="layers"):
        core(0, 4, 1, AdaptiveKnobs())


def test_who_cannot_leave_may_raise() -> None:
    """An error in the question leaves the policy as it was."""
    policy = core(1, 4, 2, AdaptiveKnobs())
    policy.admitted(1)

    def broken(_cell: int) -> bool:
        raise RuntimeError("asked")

    with pytest.raises(RuntimeError, match="asked"):
        policy.victim(broken)
    assert policy.victim(lambda _: True) == 1


def test_lookahead_stops_while_it_is_wrong_more_often_than_not() -> None:
    """The past predicts expert 0 of layer 1, which never comes.

    The mixture needs a while to trust it less; the judge of prefetches does not wait for that.
    """
    policy = core(2, 8, 4, AdaptiveKnobs(step=0.0, decays=(0.5,)))
    asked = []
    for token in range(40):
        policy.past[:] = 0
        policy.past[1, 0] = 1.2
        policy.begin_decode(token)
        policy.routed(0, np.array([[1]]))
        asked.append(policy.wishes(4))
        policy.routed(1, np.array([[1 + token % 7]]))
    assert asked[0] == [(8, False, pytest.approx(0.6))]
    assert asked[-1] == []
