"""Test the study (scripts/study) on drawn requests: its figures, its intervals, its output."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from moeinf.offload.policy.adaptive import AdaptiveKnobs
from moeinf.offload.policy.eamc import EamcKnobs
from scripts.study import eviction, paper, prediction, replays, workloads
from scripts.study.__main__ import SECTIONS, main
from scripts.study.replays import Counts, Job, replay

_LAYERS, _EXPERTS, _TOP_K, _TOKENS = 6, 16, 2, 20


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a file of eight requests of two kinds; each kind prefers experts of its own."""
    random = np.random.default_rng(0)
    path = tmp_path_factory.mktemp("drawn") / "drawn.npz"
    ids = [
        [random.permutation(5)[:_TOP_K] + 8 * (request % 2) for _ in range(_LAYERS)]
        for request in range(8)
        for _ in range(_TOKENS)
    ]
    np.savez(
        path,
        ids=np.array(ids, np.uint8),
        offsets=np.arange(9) * _TOKENS,
        prompt_len=np.full(8, 5),
        label=np.array(["a:x", "b:x"] * 4),
        experts=np.int64(_EXPERTS),
    )
    return path


def test_replays_count_by_request(drawn: Path) -> None:
    lru, best = (replay(Job(drawn, policy, 0.25)) for policy in ("lru", "belady"))
    assert lru.requests == list(range(8))
    assert lru.events.tolist() == [15 * _LAYERS * _TOP_K] * 8
    assert lru.tokens.sum() == 8 * 15
    assert 0 < lru.rate < best.rate < 1
    assert (lru.early_events == lru.events).all()  # 15 tokens are early
    warm, cold, forgetful = (
        replay(Job(drawn, "eamc", 0.3, (4, 5, 6, 7), past, forget=forget))
        for past, forget in (((0, 1, 2, 3), False), ((), False), ((), True))
    )
    assert warm.rate > cold.rate > forgetful.rate
    assert replay(Job(drawn, "adaptive", knobs=(("hysteresis", 3.0),))).hits.sum() > 0
    assert replay(Job(drawn, "lru", users=4)).requests == list(range(8))
    together = replay(Job(drawn, "lru", users=4, together=True))
    assert together.tokens.sum() == 2 * 15  # four answers of equal length share each pass


def test_parts_of_two_policies(drawn: Path) -> None:
    """One policy in both roles is that policy; without reads ahead a miss is a read."""
    whole = replay(Job(drawn, "eamc", 0.3))
    twice = replay(Job(drawn, "eamc", 0.3, ahead="eamc"))
    assert (twice.hits == whole.hits).all()
    assert twice.stall_ms.sum() == pytest.approx(whole.stall_ms.sum())
    lazy = replay(Job(drawn, "eamc", 0.3, ahead=""))
    assert (lazy.reads == lazy.events - lazy.hits).all()
    assert whole.reads.sum() > lazy.reads.sum()


def test_intervals() -> None:
    ones = np.ones(4)
    assert replays.percent(ones, 2 * ones) == "50.0 ±0.0"
    varied = np.array([0.0, 1.0] * 50)
    assert replays.half_width(replays.resampled(varied, np.ones(100))) == pytest.approx(
        0.1, abs=0.01
    )
    old = Counts([0, 1], *[4 * ones[:2], ones[:2]] * 4)
    new = Counts([1, 0], *[4 * ones[:2], 2 * ones[:2]] * 4)
    assert replays.gain(new, old) == "+25.0 ±0.0"


def test_predictions_know_the_kind(drawn: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kind decides the experts, so past requests foretell better than chance."""
    monkeypatch.setattr(prediction, "_MATCHES", 1)
    layers, tokens = prediction.predicted(drawn, (0, 1, 2, 3), (4, 5))
    right, events = np.array(tokens["EAMC"][4]).sum(0)
    assert events == 2 * 11 * 4 * _LAYERS * _TOP_K
    assert right / events > 0.7  # 4 of the 5 experts of a kind are guessed
    right, events = np.array(layers["co-activation"][2]).sum(0)
    assert events == 2 * 14 * (_LAYERS - 2) * _TOP_K
    assert right / events > 0.7


def test_likeness(drawn: Path) -> None:
    rows = dict(workloads.alike(drawn))
    used = rows["experts used at all, %"]
    assert used[0] == pytest.approx(100 * 5 / 16, abs=0.1)
    assert used[1] == pytest.approx(100 * 10 / 16, abs=0.1)
    assert rows["the nearest has the same label, %"][:2].tolist() == [0, 100]
    assert workloads.kinds(drawn) == ["a", "b"]


def test_groups_and_concentration(drawn: Path) -> None:
    """Two kinds make two groups; each uses 5 of 16 experts, so the first 3 have 3/5 or more."""
    count, largest, right, foretold, _ = paper.clusters(drawn)[0]
    assert (count, largest, right, foretold) == ("2", "50.0", "100.0", "100.0")
    mine, chance, whole = (float(c.split(" ")[0]) for c in paper.concentration(drawn)[-1][1:])
    assert mine >= 60 > chance > whole >= 30
    assert paper.working_set(drawn)[:1] == ["12.5 ±0.0"]


@pytest.mark.linux("asks for the usable cores")
@pytest.mark.parametrize(
    "sections",
    [["policies", "shift"], pytest.param(list(SECTIONS), marks=pytest.mark.full)],
    ids=["two", "all"],
)
def test_sections(
    drawn: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], sections: list[str]
) -> None:
    picture = tmp_path / "study.png"
    options = ["--quick", "--only", ",".join(sections), "--processes", "1"]
    main([str(drawn), *options, "--picture", str(picture)])
    text = capsys.readouterr().out
    assert [line for line in text.splitlines() if line.startswith("###")] == [
        f"### {name}, drawn" for name in sections
    ]
    assert "nan" not in text
    assert picture.read_bytes()[:4] == b"\x89PNG"


def test_every_knob_has_its_default_among_its_values() -> None:
    for values, knobs in (
        (eviction.ADAPTIVE_VALUES, AdaptiveKnobs()),
        (eviction.EAMC_VALUES, EamcKnobs()),
    ):
        assert set(values) == set(vars(knobs))
        for knob, tried in values.items():
            assert getattr(knobs, knob) in tried, knob
