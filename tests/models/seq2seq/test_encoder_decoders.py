"""Compare encoder-decoders with their reference: source, answer, and the calls to experts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from moeinf.models.base import ContextFull
from moeinf.models.seq2seq.encoder_decoder import EncoderDecoder, SourceState
from tests.encoder_decoders import PAIRS, pair_reference, save_pair
from tests.fakes import Loaded, WatchedExperts, load_resident
from tests.models.conftest import typical

SOURCE, ANSWER = 37, 30


@dataclass
class Translation:
    """Our model, a source, an answer, and the reference's logits for every token of the answer."""

    ours: Loaded
    source: list[int]
    answer: list[int]
    logits: Tensor  # [ANSWER, vocab]

    @property
    def model(self) -> EncoderDecoder:
        assert isinstance(self.ours.model, EncoderDecoder)
        return self.ours.model

    def read(self, capacity: int = 40) -> SourceState:
        state = self.model.new_state(capacity)
        self.model.encode(self.source, state, self.ours.experts)
        return state

    def assert_close(self, actual: Tensor, start: int = 0) -> None:
        expected = self.logits[start : start + len(actual)]
        assert actual.shape == expected.shape
        worst = float((actual - expected).abs().max())
        assert worst <= 1e-4 * float(self.logits.abs().max()), worst


def _reference_logits(reference: Any, source: list[int], answer: list[int]) -> Tensor:
    """Return the logits token by token with transformers' cache, like generate()."""
    rows, past = [], None
    with torch.no_grad():
        encoded = reference.get_encoder()(input_ids=torch.tensor([source]))
        for token in answer:
            out = reference(
                encoder_outputs=encoded,
                decoder_input_ids=torch.tensor([[token]]),
                past_key_values=past,
                use_cache=True,
            )
            past = out.past_key_values
            rows.append(out.logits[0, -1])
    return torch.stack(rows)


@pytest.fixture(scope="session")
def translate(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Translation]:
    @cache
    def make(name: str) -> Translation:
        folder = tmp_path_factory.mktemp(name)
        reference = save_pair(name, folder)
        draw = torch.Generator().manual_seed(7)
        source = torch.randint(3, 97, (SOURCE,), generator=draw).tolist()
        answer = [reference.config.decoder_start_token_id]
        answer += torch.randint(3, 97, (ANSWER - 1,), generator=draw).tolist()
        logits = _reference_logits(reference, source, answer)
        return Translation(load_resident(folder), source, answer, logits)

    return make


@pytest.fixture(params=list(PAIRS))
def pair(request: pytest.FixtureRequest, translate: Callable[[str], Translation]) -> Translation:
    return translate(request.param)


def test_every_tensor_has_a_place(pair: Translation) -> None:
    assert pair.ours.unused == set()
    assert pair.logits.std() > 0.3  # the comparison means something
    assert (pair.logits[3] - pair.logits[4]).abs().max() > 0.1
    assert pair.model.start_token == pair.answer[0]


def test_decode(pair: Translation) -> None:
    state = pair.read()
    for at, token in enumerate(pair.answer):
        pair.assert_close(pair.model.extend([([token], state)], pair.ours.experts), at)
    assert state.length == ANSWER


def test_several_tokens_at_once(pair: Translation) -> None:
    """A prompt for the decoder, short enough that no expert is full."""
    state = pair.read()
    for start, stop in pairwise((0, 2, 3, 6, 7, 10)):
        batch = [(pair.answer[start:stop], state)]
        pair.assert_close(pair.model.extend(batch, pair.ours.experts, "all"), start)


def test_batch_equals_single(pair: Translation) -> None:
    """Two requests of different age and one with another source."""
    states = [pair.read() for _ in range(3)]
    model, experts = pair.model, pair.ours.experts
    model.encode(pair.source[:9], states[2], experts)
    model.extend([([token], states[1]) for token in pair.answer[:1]], experts)
    for token in pair.answer[1:5]:
        model.extend([([token], states[1])], experts)
    batch = [(pair.answer[:2], states[0]), (pair.answer[5:6], states[1]), ([4], states[2])]
    logits = model.extend(batch, experts, "all")
    pair.assert_close(logits[:2])
    pair.assert_close(logits[2:3], 5)
    alone = model.new_state(40)
    model.encode(pair.source[:9], alone, experts)
    assert (model.extend([([4], alone)], experts) - logits[3]).abs().max() < 1e-4


@pytest.mark.parametrize("name", list(PAIRS))
def test_bfloat16(name: str, tmp_path: Path) -> None:
    """With the same bfloat16 weights our error is at most 1.5 times that of transformers."""
    theirs, ours = [], []
    for seed in range(4):
        reference = pair_reference(name, seed).to(torch.bfloat16)
        reference.save_pretrained(tmp_path / str(seed))
        draw = torch.Generator().manual_seed(seed)
        source = torch.randint(3, 97, (SOURCE,), generator=draw).tolist()
        answer = torch.randint(3, 97, (ANSWER,), generator=draw).tolist()
        rounded = _reference_logits(reference, source, answer).float()
        exact = _reference_logits(reference.float(), source, answer)
        loaded = load_resident(tmp_path / str(seed))
        model = loaded.model
        assert isinstance(model, EncoderDecoder)
        state = model.new_state(40)
        model.encode(source, state, loaded.experts)
        found = [model.extend([([token], state)], loaded.experts) for token in answer]
        theirs.append(rounded - exact)
        ours.append(torch.cat(found) - exact)
    assert 0 < typical(ours) <= 1.5 * typical(theirs)


def test_phases_and_layers(pair: Translation) -> None:
    """The encoder's MoE layers come first, and run only once."""
    watched = WatchedExperts(pair.ours.experts)
    model, state = pair.model, pair.model.new_state(40)
    state.request = 4
    moe = model.moe
    assert 0 < moe.encoder_layers < moe.layers
    model.encode(pair.source, state, watched)
    assert watched.passes[0].phase == "encode"
    assert watched.passes[0].rows == [4] * SOURCE
    assert watched.passes[0].layers == list(range(moe.encoder_layers))
    watched.first_layer = moe.encoder_layers
    model.extend([(pair.answer[:2], state)], watched)
    model.extend([(pair.answer[2:3], state)], watched)
    assert [p.phase for p in watched.passes[1:]] == ["prefill", "decode"]
    assert all(p.layers == list(range(moe.encoder_layers, moe.layers)) for p in watched.passes[1:])


def test_truncate_and_snapshot(pair: Translation) -> None:
    model, experts = pair.model, pair.ours.experts
    state = pair.read()
    for token in pair.answer[:5]:
        model.extend([([token], state)], experts)
    copy = state.snapshot()
    state.truncate(2)
    model.encode(pair.source[:5], state, experts)  # must not reach the copy
    assert (state.length, copy.length, copy.capacity) == (0, 5, 40)
    pair.assert_close(model.extend([([pair.answer[5]], copy)], experts), 5)


def test_failures_leave_the_state(translate: Callable[[str], Translation]) -> None:
    pair = translate("switch")
    model, state = pair.model, pair.read()
    model.extend([([0], state)], pair.ours.experts)
    watched = WatchedExperts(pair.ours.experts, fail_in=1)
    with pytest.raises(RuntimeError, match="gone"):
        model.encode([5, 6], state, watched)
    assert watched.passes[-1].accepted == [False, False]
    pair.assert_close(model.extend([(pair.answer[1:2], state)], pair.ours.experts), 1)
    with pytest.raises(ContextFull):
        model.encode([1] * 41, state, pair.ours.experts)
    with pytest.raises(ValueError, match="token ids"):
        model.encode([97], state, pair.ours.experts)
    with pytest.raises(ValueError, match="no states"):
        model.extend([([0], state)], pair.ours.experts, "states")
    with pytest.raises(ValueError, match="no source"):
        model.extend([([0], model.new_state(4))], pair.ours.experts)


def test_full_experts_drop_tokens(translate: Callable[[str], Translation]) -> None:
    """37 tokens and 3 experts of 3 places: at most the first 9 tokens get an expert."""
    pair = translate("switch-full")
    watched = WatchedExperts(pair.ours.experts)
    pair.model.encode(pair.source, pair.model.new_state(40), watched)
    for ids in watched.passes[0].routed:
        counts = torch.bincount(ids[ids >= 0], minlength=3)
        assert counts.max() == 3
        assert (ids < 0).sum() == SOURCE - counts.sum() >= 28
        assert ids[0] >= 0  # in token order
