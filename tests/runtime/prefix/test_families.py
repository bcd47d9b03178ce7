"""The KV of every kind of cache, copied out and back: the next tokens have the same bits."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from moeinf.models.base import KvForm
from moeinf.models.layers.kv_cache import KvCache
from moeinf.runtime.prefix import columns, folder
from moeinf.runtime.prefix.cache import PrefixCache
from tests.fakes import load_resident
from tests.tiny import save_tiny

KINDS = [
    ("qwen3", "full"),
    ("qwen3", "q8"),
    ("deepseek-v3", "full"),
    ("deepseek-v3", "q8"),
    ("gpt-oss", "full"),
    ("qwen3.5", "full"),
    ("qwen3.5", "q8"),
    ("phimoe", "full"),
    ("glm-dsa", "full"),
    ("glm-dsa", "q8"),
    *(pytest.param(n, "full", marks=pytest.mark.full) for n in ("lfm2", "mimo", "kimi-linear")),
    *(pytest.param("glm5-next", kv, marks=pytest.mark.full) for kv in ("full", "q8")),
    *(pytest.param(n, "full", marks=pytest.mark.full) for n in ("nemotron", "qwen4", "gemma4")),
    *(pytest.param(n, "full", marks=pytest.mark.full) for n in ("deepseek-v4", "granite-hybrid")),
    pytest.param("qwen4", "q8", marks=pytest.mark.full),
]  # MLA, windows, recurrent, longrope, indexers
IDS = [(7 * place + place // 5) % 50 for place in range(100)]


@pytest.mark.parametrize(("kind", "kv"), KINDS)
def test_copied_out_and_back(
    kind: str, kv: KvForm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(columns, "BLOCK_BYTES", 8192)  # planes in pieces, several to a read
    monkeypatch.setattr(folder, "BLOCK_BYTES", 16384)
    save_tiny(kind, tmp_path, seed=1)
    ours = load_resident(tmp_path, kv=kv)
    model, experts = ours.model, ours.experts
    state, back = model.new_state(110), model.new_state(110)
    assert isinstance(state, KvCache)
    assert isinstance(back, KvCache)
    model.extend([(IDS, state)], experts)

    def opened(memory_bytes: int) -> PrefixCache:
        files = folder.PrefixFolder(tmp_path / "prefix", bytes(16), 1 << 30, print)
        return PrefixCache(state.layout, bytes(16), memory_bytes, False, files, print)

    first = opened(1 << 30)
    first.keep(state, IDS)
    first.close()
    again = opened(1 << 24)
    found = again.find([*IDS, 1])
    assert found.tokens == len(IDS)
    assert again.restore(back, found) == back.length == len(IDS)
    assert again.stats.bytes_read > 0
    for token in (3, 4, 5):
        logits = [model.extend([([token], one)], experts) for one in (state, back)]
        assert torch.equal(*logits)
    earlier = again.find([*IDS[:90], 49])
    recurrent = state.layout.recurrent is not None
    assert earlier.tokens == (64 if recurrent else 90)  # of the mark within the pass
    third = model.new_state(110)
    assert isinstance(third, KvCache)
    assert again.restore(third, earlier) == earlier.tokens
    fresh = model.new_state(110)
    model.extend([(IDS[:64], fresh)], experts)
    logits = [model.extend([(IDS[one.length : 95], one)], experts) for one in (third, fresh)]
    assert torch.allclose(*logits, atol=1e-4 * float(logits[0].abs().max()))
    again.close()
