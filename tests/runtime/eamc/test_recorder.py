"""The engine's recordings: counts by hand, separate requests, nothing missing or extra."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from moeinf.models.base import Phase
from moeinf.models.layers.moe import Done
from moeinf.offload.routing.recording_file import recording_from_bytes, recording_to_bytes
from moeinf.offload.routing.trace import RoutingShape
from moeinf.runtime.config import EngineConfig, Settings
from moeinf.runtime.eamc.recorder import Recorder
from moeinf.runtime.engine.engine import Engine
from moeinf.runtime.generation.chat import Conversation
from moeinf.runtime.library.library import Library
from moeinf.runtime.requests import Limits
from moeinf.runtime.sampling.sampler import SamplingOptions
from moeinf.runtime.sizes import parse_memory
from tests.conftest import Open
from tests.watched import Watched

GREEDY = SamplingOptions(temperature=0)
SHAPE = RoutingShape(2, 4, 2)


class Silent:
    """`Experts` that compute nothing."""

    wants_hints = False

    def begin_pass(self, rows: torch.Tensor, phase: Phase) -> None: ...

    def submit(self, layer: int, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> Done:
        return Done(x)

    def hint(self, layer: int, ids: torch.Tensor, scores: torch.Tensor) -> None:
        raise AssertionError("nobody asked")

    def end_pass(self, accepted_rows: torch.Tensor | None = None) -> None: ...


def run(
    recorder: Recorder,
    rows: list[int],
    phase: Phase,
    layers: list[list[list[int]]],
    accepted: list[bool] | None = None,
) -> None:
    recorder.begin_pass(torch.tensor(rows), phase)
    for layer, ids in enumerate(layers):
        x = torch.zeros(len(rows), 3)
        weights = torch.full((len(rows), 2), 0.25 * (layer + 1))
        if layer == 0 and recorder.wants_hints:
            recorder.hint(1, torch.tensor(ids), weights)
        assert recorder.submit(layer, x, torch.tensor(ids), weights).result() is x
    recorder.end_pass(None if accepted is None else torch.tensor(accepted))


def test_counts_by_hand() -> None:
    """Two requests in one prefill, then decoded together; the last row of 7 is rejected."""
    recorder = Recorder(Silent(), SHAPE)
    run(recorder, [7, 7, 9], "prefill", [[[0, 1], [0, 2], [3, 1]], [[1, 0], [1, 2], [2, 3]]])
    run(
        recorder,
        [7, 7, 9],
        "decode",
        [[[3, 2], [1, 1], [0, -1]], [[0, 1], [2, 2], [1, 3]]],
        [True, False, True],
    )
    run(recorder, [7], "decode", [[[2, 2]]], [False])  # stopped after the first layer
    seven, nine = recorder.finish(7), recorder.finish(9)
    assert seven is not None
    assert nine is not None
    assert seven.prefill.tolist() == [[2, 1, 1, 0], [1, 2, 1, 0]]
    assert seven.decode.tolist() == [[0, 0, 1, 1], [1, 1, 0, 0]]
    assert nine.prefill.tolist() == [[0, 1, 0, 1], [0, 0, 1, 1]]
    assert nine.decode.tolist() == [[1, 0, 0, 0], [0, 1, 0, 1]]
    assert recorder.finish(7) is None


def test_a_recording_keeps_events_weights_and_hints() -> None:
    recorder = Recorder(Silent(), SHAPE)
    assert not recorder.wants_hints
    recording = recorder.record("x")
    assert recorder.wants_hints
    run(recorder, [5, 5], "prefill", [[[0, 1], [0, 2]], [[1, 0], [1, 2]]], [True, False])
    run(recorder, [5], "decode", [[[3, 2]]], [False])
    kept = recording_from_bytes(recording_to_bytes(recording))
    (only,) = kept.passes
    assert only.ids.tolist() == [[[0, 1], [0, 2]], [[1, 0], [1, 2]]]
    assert only.accepted.tolist() == [True, False]
    assert only.weights is not None
    assert only.weights[:, 0].tolist() == [[0.25, 0.25], [0.5, 0.5]]
    assert only.hints is not None
    assert only.hints.tolist() == [[[-1, -1], [-1, -1]], [[0, 1], [0, 2]]]


def ask(engine: Engine, prompt: str, conversation: Conversation | None = None) -> list[int]:
    answer = (conversation or Conversation(engine)).ask(prompt, GREEDY, Limits(max_tokens=30))
    list(answer)
    return answer.tokens


@pytest.fixture
def traced(demo_home: Path, tmp_path: Path, open_engine: Open) -> Engine:
    """Return an engine on the demo with its own state."""
    (tmp_path / "models").symlink_to(demo_home / "models")
    settings = Settings(tmp_path)
    manifest, folder = Library(settings).read("demo")
    return Engine.open(manifest, folder, EngineConfig(memory=parse_memory("30%")), settings)


def test_every_answer_becomes_an_entry_that_adds_up(traced: Engine) -> None:
    """Each row of an EAM sums to tokens · K: 4 per token in each of 6 layers."""
    with traced as engine:
        conversation = Conversation(engine)
        first = ask(engine, "sort owl, fig, ant", conversation)
        cached = conversation.cached_tokens
        second = ask(engine, "reverse planet", conversation)
        one, two = engine.tracing.eamc.load().entries()
        assert (one.prefill.sum(1) == 4 * len(conversation.prompt(conversation.messages[:1]))).all()
        assert (one.decode.sum(1) == 4 * (len(first) - 1)).all()
        assert (two.decode.sum(1) == 4 * (len(second) - 1)).all()
        asked = len(conversation.prompt(conversation.messages[:3]))
        assert 4 * (asked - cached - 5) <= two.prefill[0].sum() <= 4 * (asked - cached + 5)
        assert engine.take_notes() == []


def test_tracing_and_hints_change_no_token(traced: Engine, open_engine: Open) -> None:
    plain = open_engine(memory="30%")
    prompts = ("17+25=", "close ([{<", "4091 in words")
    with plain.routed_through(lambda _: plain.store):
        expected = [ask(plain, prompt) for prompt in prompts]
    with traced as engine:
        recording = engine.record("x")
        assert [ask(engine, prompt) for prompt in prompts] == expected
        assert len(recording.requests) == 3
        phases = Counter(done.phase for done in recording.passes)
        assert phases == {"prefill": 3, "decode": sum(len(tokens) - 1 for tokens in expected)}
        eams = list(recording.request_eams().values())
        for kept, entry in zip(eams, engine.tracing.eamc.load().entries(), strict=True):
            assert (kept.prefill == entry.prefill).all()
            assert (kept.decode == entry.decode).all()
        hit = total = 0
        for done in recording.passes:
            assert done.hints is not None
            assert done.weights is not None
            assert (done.hints[0] == -1).all()
            np.testing.assert_array_less(0, done.weights)
            hints, ids = done.hints[1:, :, :, None], done.ids[1:, :, None, :]
            hit += int((hints == ids).sum())
            total += ids.size
        assert 0.55 < hit / total < 0.95


def test_no_trace_leaves_nothing(tmp_path: Path, demo_home: Path) -> None:
    (tmp_path / "models").symlink_to(demo_home / "models")
    settings = Settings(tmp_path)
    manifest, folder = Library(settings).read("demo")
    with Engine.open(manifest, folder, EngineConfig(trace=False), settings) as engine:
        ask(engine, "17+25=")
    assert not (tmp_path / "state").exists()


def test_an_answer_that_was_stopped_in_its_prefill_is_no_entry(traced: Engine) -> None:
    with traced as engine, engine.routed_through(Passes) as passes:
        list(Conversation(engine).ask("17+25=", GREEDY, Limits(), lambda: passes.begun == 1))
        assert (passes.begun, len(engine.tracing.eamc.load())) == (1, 0)
        passes.begun = 0  # prefill, two tokens, and stop in the pass after
        list(Conversation(engine).ask("4091 in words", GREEDY, Limits(), lambda: passes.begun == 4))
        (entry,) = engine.tracing.eamc.load().entries()
        assert entry.decode.sum() == 2 * 6 * 4


class Passes(Watched):
    """Counts passes."""

    begun = 0

    def begin_pass(self, rows: torch.Tensor, phase: Phase, pieces: Sequence[slice] = ()) -> None:
        self.begun += 1
        super().begin_pass(rows, phase, pieces)


def test_a_state_that_cannot_be_written_is_a_note(traced: Engine, tmp_path: Path) -> None:
    with traced as engine:
        folder = tmp_path / "state/demo/bf16"
        (folder / "eamc.log").symlink_to("/nowhere/x")
        assert len(ask(engine, "17+25=")) == 3
        (note,) = engine.take_notes()
        assert "the EAMC of demo:bf16 cannot be written" in note
        assert len(ask(engine, "17+25=")) == 3
        assert engine.take_notes() == []
