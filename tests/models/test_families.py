"""Compare every family with transformers, in one runner."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
import torch

from tests.fakes import WatchedExperts, load_resident
from tests.models.conftest import Pair, typical
from tests.tiny import TINY, by_default, save_tiny


def test_every_tensor_has_a_place(pair: Pair) -> None:
    assert pair.ours.unused == set()
    assert pair.logits.std() > 0.5  # the comparison means something


@pytest.mark.parametrize("length", [1, 2, 7, 33])
def test_prefill(pair: Pair, length: int) -> None:
    model = pair.ours.model
    state = model.new_state(40)
    logits = model.extend([(pair.ids[:length], state)], pair.ours.experts, "all")
    pair.assert_close(logits)
    assert state.length == length


def test_chunked_prefill(pair: Pair) -> None:
    model, cuts = pair.ours.model, [0, 5, 6, 26, 33]
    state = model.new_state(33)
    for start, stop in pairwise(cuts):
        chunk = [(pair.ids[start:stop], state)]
        pair.assert_close(model.extend(chunk, pair.ours.experts, "all"), start)


def test_decode(pair: Pair) -> None:
    model = pair.ours.model
    experts = WatchedExperts(pair.ours.experts)
    state = model.new_state(len(pair.ids))
    last = model.extend([(pair.ids[:30], state)], experts)
    pair.assert_close(last, 29)
    for at in range(30, len(pair.ids)):
        pair.assert_close(model.extend([([pair.ids[at]], state)], experts), at)
    assert [p.phase for p in experts.passes] == ["prefill"] + ["decode"] * 30
    assert all(p.layers == list(range(model.moe.layers)) for p in experts.passes)


def test_batch_equals_single(pair: Pair) -> None:
    """Run requests of different length, with one and with many rows, in one pass."""
    model = pair.ours.model
    states = [model.new_state(60) for _ in range(3)]
    model.extend([(pair.ids[:21], states[1])], pair.ours.experts)
    model.extend([(pair.ids[:4], states[2])], pair.ours.experts)
    batch = [(pair.ids[:9], states[0]), (pair.ids[21:22], states[1]), (pair.ids[4:10], states[2])]
    logits = model.extend(batch, pair.ours.experts, "all")
    for rows, start in ((logits[:9], 0), (logits[9:10], 21), (logits[10:], 4)):
        pair.assert_close(rows, start)
    for _ in range(20):  # decode passes of three
        places = [s.length for s in states]
        last = model.extend([([pair.ids[s.length]], s) for s in states], pair.ours.experts)
        for row, place in zip(last, places, strict=True):
            pair.assert_close(row[None], place)
    assert [s.length for s in states] == [29, 42, 30]


def test_truncate_and_snapshot(pair: Pair) -> None:
    model, experts = pair.ours.model, pair.ours.experts
    state = model.new_state(50)
    wrong = [(i + 1) % 97 for i in pair.ids[12:30]]
    model.extend([(pair.ids[:12] + wrong, state)], experts)
    state.truncate(12)
    kept = state.length
    assert kept == (0 if model.state_bytes else 12)  # recurrent layers: see test_recurrent.py
    copy = state.snapshot()
    model.extend([(wrong, state)], experts)  # must not reach the copy
    assert (copy.length, copy.capacity, state.length) == (kept, 50, kept + 18)
    pair.assert_close(model.extend([(pair.ids[kept:20], copy)], experts, "all"), kept)
    state.truncate(0)
    pair.assert_close(model.extend([(pair.ids[:3], state)], experts, "all"))


def test_kv_in_q8(pair: Pair) -> None:
    """Prompt, tokens and a prompt after a snapshot: the typical error is below 6 % of the logits'.

    A row has 32 values at most that share a scale, here 8 to 28: 10 or more bits a value.
    """
    ours = load_resident(pair.folder, kv="q8")
    model, experts, ids = ours.model, ours.experts, pair.ids
    assert pair.ours.model.kv_bytes_per_token / 4 < model.kv_bytes_per_token
    assert model.kv_bytes_per_token <= pair.ours.model.kv_bytes_per_token / 3
    state = model.new_state(60)
    parts = [model.extend([(ids[:20], state)], experts, "all")]
    state = state.snapshot()
    parts += [model.extend([([token], state)], experts) for token in ids[20:30]]
    parts += [model.extend([(ids[30:], state)], experts, "all")]
    errors = (torch.cat(parts) - pair.logits).square().mean(-1).sqrt() / pair.logits.std()
    assert 1e-4 < float(errors.median()) < 0.06  # a token may move to another expert


@pytest.mark.parametrize("name", by_default(list(TINY), least=True))
def test_bfloat16(name: str, tmp_path: Path) -> None:
    """With the same bfloat16 weights our error is at most 1.5 times that of transformers."""
    theirs, ours = [], []
    for seed in range(6):
        folder = tmp_path / str(seed)
        reference = save_tiny(name, folder, seed, torch.bfloat16)
        ids = torch.randint(97, (1, 48), generator=torch.Generator().manual_seed(seed))
        with torch.no_grad():
            rounded = reference(ids, use_cache=False).logits[0].float()
            exact = reference.float()(ids, use_cache=False).logits[0]
        loaded = load_resident(folder)
        model, tokens = loaded.model, ids[0].tolist()
        state = model.new_state(48)
        parts = [model.extend([(tokens[:32], state)], loaded.experts, "all")]
        parts += [model.extend([([token], state)], loaded.experts) for token in tokens[32:]]
        theirs.append(rounded - exact)
        ours.append(torch.cat(parts) - exact)
    assert 0 < typical(ours) <= 1.5 * typical(theirs)
