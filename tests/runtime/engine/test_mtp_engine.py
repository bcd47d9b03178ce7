"""Layers for multi-token prediction against a plain reference, and their memory in the plan."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from moeinf.models.layers.kv_cache import CacheLayout, KvCache
from moeinf.runtime.config import EngineConfig, Settings
from moeinf.runtime.engine import opening
from moeinf.runtime.engine.engine import Engine
from moeinf.runtime.engine.mtp_engine import MtpEngine, TextStates
from moeinf.runtime.library.library import Library
from moeinf.runtime.placement import draft_plan
from moeinf.runtime.placement.draft_plan import place_both
from moeinf.runtime.sizes import parse_memory
from tests.conftest import pull
from tests.tiny import tiny_reference
from tests.tiny_modules import checkpoint, tiny_of

FAMILIES = ["deepseek-v3", "glm4", "qwen3-next", "qwen3.5", "mimo"]
TEXT = [(7 + 31 * place) % 97 for place in range(24)]


class Reference:
    """The module as in section 2.2 of the report on DeepSeek-V3, around transformers' layer."""

    def __init__(self, name: str, folder: Path, layer: int) -> None:
        self.model, (path,) = tiny_reference(tiny_of(name), seed=4), folder.glob("*.safetensors")
        self.layer, tensors = self.model.model.layers[layer], load_file(path)
        self.centred, self.eps = name.startswith("qwen"), self.model.config.rms_norm_eps
        stem = "mtp." if self.centred else f"model.layers.{len(self.model.model.layers)}."
        names = ("enorm", "hnorm", "eh_proj", "shared_head.norm")
        if self.centred:
            names = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm")
        self.window = None
        if name == "mimo":
            stem, names = "model.mtp.layers.0.", (*names[:3], "final_layernorm")
            self.window = self.model.config.sliding_window
        parts = [tensors[f"{stem}{n}.weight"].float() for n in names]
        self.of_embedding, self.of_hidden, self.joining, self.last = parts

    def norm(self, x: Tensor, weight: Tensor) -> Tensor:
        weight = weight + 1 if self.centred else weight
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * weight

    @torch.inference_mode()
    def draft(self, text: list[int], count: int) -> list[tuple[Tensor, int]]:
        """Return the normed output and the token of each of `count` drafted tokens."""
        inner, found = self.model.model, list[tuple[Tensor, int]]()
        hidden = inner(torch.tensor([text[:-1]]), use_cache=False).last_hidden_state
        tokens = text[1:]
        for _ in range(count):
            embedded = inner.embed_tokens(torch.tensor([tokens]))
            joined = self.norm(embedded, self.of_embedding), self.norm(hidden, self.of_hidden)
            u = torch.cat(joined, -1) @ self.joining.T
            places = torch.arange(len(tokens))[None]
            masked = torch.full((len(tokens), len(tokens)), -torch.inf).triu(1)[None, None]
            kind = ("sliding_attention",) if self.window else ()
            if self.window:
                far = torch.ones(len(tokens), len(tokens)).tril(-self.window).bool()
                masked = masked.masked_fill(far, -torch.inf)
            out = self.layer(
                u,
                attention_mask=masked,
                position_ids=places,
                position_embeddings=inner.rotary_emb(u, places, *kind),
            )
            out = out[0] if isinstance(out, tuple) else out
            last = self.norm(out, self.last)[:, -1:]
            token = int(self.model.lm_head(last)[0, 0].argmax())
            found.append((last[0, 0], token))
            hidden, tokens = torch.cat((hidden, last), 1), [*tokens, token]
        return found


@pytest.mark.parametrize("name", FAMILIES)
def test_drafts_are_those_of_a_plain_reference(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = checkpoint(name, tmp_path / "checkpoint")
    expected = Reference(name, tmp_path / "checkpoint", layer).draft(TEXT, 3)
    settings = Settings(tmp_path)
    manifest = pull(tmp_path / "checkpoint", settings, "tiny:f32")
    for module in (opening, draft_plan):  # f32 is close to the reference, and never drafts
        monkeypatch.setattr(module, "may_draft", lambda *_: True)
    folder = Library(settings).read("tiny:f32")[1]
    config = EngineConfig(context=64, memory=parse_memory("100%"))
    with Engine.open(manifest, folder, config, settings) as engine:
        draft, state = engine.draft, engine.new_state()
        assert isinstance(draft, MtpEngine)
        engine.extend(state, TEXT[:9])
        engine.extend(state, TEXT[9:-1])
        for again in range(2):
            text = draft.text(TEXT)
            assert (text, draft.state.length) == (TEXT[1:], again * (len(TEXT) - 1))
            new = text[-1:] if again else text
            draft.state.truncate(len(text) - len(new))
            for last, token in expected:
                found, chance = draft.extend(new, lambda: False)
                torch.testing.assert_close(draft._last[0], last, atol=2e-3, rtol=2e-3)
                assert found == token
                assert 1 / 97 < chance < 1
                new = [found]
            assert draft.state.length == len(TEXT) + 1


def test_states_of_one_text() -> None:
    layout = CacheLayout(1, ((1, 2),), torch.float32, torch.device("cpu"))
    one, other = KvCache(layout, 16), KvCache(layout, 16)
    states = TextStates(16, 2, torch.float32)

    def passed(state: KvCache, ids: list[int], kept: int | None = None) -> None:
        rows = torch.tensor(ids, dtype=torch.float32)[:, None].expand(-1, 2)
        states.follow([(ids, state)], rows)
        state.advance(len(ids) if kept is None else kept)

    assert not states.reach([1, 2])
    passed(one, [1, 2, 3])
    assert states.reach([1, 2, 3, 9])
    assert not states.reach([1, 2, 3, 4, 9])  # 4 was not computed
    passed(one, [4, 5, 6], kept=1)  # 5 and 6 were rejected
    assert states.reach([1, 2, 3, 4, 9])
    assert (states.start, states.end) == (0, 4)
    passed(one, [9])
    assert states.rows[:5, 0].tolist() == [1, 2, 3, 4, 9]
    version = states.version
    one.truncate(2)
    passed(one, [7])
    assert states.reach([1, 2, 7, 8])
    assert states.version == version
    one.truncate(0)
    one.resume(2)  # from elsewhere: 5 6
    passed(one, [7, 8])
    assert states.reach([5, 6, 7, 8, 9])
    assert (states.start, states.version) == (2, version + 1)
    one.resume(9)  # and the states of some tokens are unknown
    passed(one, [3])
    assert states.start == 9
    passed(other, [1, 2])
    assert (states.start, states.end, states.version) == (0, 2, version + 3)


def test_their_memory_is_promised(tmp_path: Path) -> None:
    checkpoint("glm4", tmp_path / "checkpoint")
    settings, library = Settings(tmp_path), Library(Settings(tmp_path))
    for tag in ("q4", "f32"):
        pull(tmp_path / "checkpoint", settings, f"tiny:{tag}")
    (manifest, folder), (wide, _) = library.read("tiny:q4"), library.read("tiny:f32")
    modules = manifest.modules
    assert modules is not None

    def placed(free: int = 8 << 30, model: Any = manifest, **options: Any) -> tuple[int, Any]:
        found, beside = place_both(model, EngineConfig(context=64, threads=1, **options), free, 2)
        return found.draft_bytes, beside

    size, beside = placed()
    assert beside.slots == modules.slots.experts
    assert size > modules.slots.max_bytes + modules.dense_bytes + 64 * manifest.hidden
    assert placed(memory=parse_memory("60%"))[0] == size
    nothing: list[tuple[Any, dict[str, Any]]] = [
        (manifest, {"mtp": False}),
        (manifest, {"speculation": False}),
        (manifest, {"skip_below": 0.1}),
        (wide, {}),
    ]
    for model, options in nothing:
        assert placed(model=model, **options) == (0, None)
    alone, _ = place_both(manifest, EngineConfig(context=64, threads=1, mtp=False), 8 << 30, 2)
    few = alone.peak_bytes + (1 << 30) + size // 2  # the experts fit, and not all of the rest
    assert placed(few) == (0, None)
    config = EngineConfig(context=64, threads=1)
    with Engine.open(manifest, folder, config, settings) as engine:
        place = engine.info.placement
        assert place.draft_bytes == size
        assert any("multi-token" in note for note in place.notes)
        assert engine.info.peak_bytes > size
