"""Test that a tiny model with random weights routes as the recorded models did."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from benchmarks.curves import hint_recall, record
from benchmarks.recorded_routing import ROUTINGS, fitted, name_of, recorded, routed, text, words
from benchmarks.shapes import shape
from benchmarks.suite import models
from benchmarks.suite.models import layers_that_fit
from tests.benchmarks.tiny_shapes import tiny_olmoe

_TINY = tiny_olmoe(3)


@pytest.mark.parametrize(
    ("routing", "tag", "least"),
    [("deepseek-v2-lite", "bf16", 0.995), ("gpt-oss-20b", "q4", 0.97)],
)
def test_the_routing_is_the_recorded_one(
    tmp_path: Path, routing: str, tag: str, least: float
) -> None:
    model = routed(tmp_path, "tiny", _TINY, routing)
    chosen = text(routing, _TINY, 60, 20, seed=1)
    found = record(model, tag, chosen[:20], chosen[20:])
    assert found.shape.experts == recorded(routing).experts
    assert found.shape.top_k == recorded(routing).top_k
    known = words(routing, 128)
    ids = np.concatenate([done.ids for done in found.passes], 1)  # [L, T, K]
    wanted = known.ids[chosen].transpose(1, 0, 2)[:3]
    right = [np.isin(ids[at], wanted[at]).mean() for at in np.ndindex(ids.shape[:2])]
    assert np.mean(right) >= least
    assert 0.6 < hint_recall(found) < 0.95
    again = routed(tmp_path, "tiny", _TINY, routing)  # its files are there
    assert again.given == model.given


def test_a_text_has_a_prompt_then_the_answer_of_its_request() -> None:
    known = words("deepseek-v2-lite", 2048)
    request = recorded("deepseek-v2-lite").requests[2]
    chosen = text("deepseek-v2-lite", shape("olmoe"), 30, 10, seed=2)
    assert min(chosen[:10]) >= known.answers > max(chosen[10:])
    np.testing.assert_array_equal(known.ids[chosen[10:]], request.decode_ids[:20])
    assert len(known.ids) == 1536
    assert len(words("gpt-oss-20b", 2048).ids) == 1536  # without prompts
    calibrated = text("calibrated", shape("olmoe"), 30, 10)
    assert calibrated == text("calibrated", shape("olmoe"), 30, 20)


def test_shapes_and_names(tmp_path: Path) -> None:
    config = fitted(shape("qwen3-30b-a3b"), "gpt-oss-20b")
    assert (config["num_experts"], config["num_experts_per_tok"]) == (32, 4)
    assert fitted(config, "calibrated") is config
    assert len({name_of("olmoe", routing) for routing in ROUTINGS}) == 3
    assert layers_that_fit(tmp_path, "olmoe", "q4", set(), ROUTINGS[0]) in (1, 2, 4, 8, 16)
    assert models.make(tmp_path, "thin", 2, "q4", set(), "", ROUTINGS[0]).routing == "calibrated"
