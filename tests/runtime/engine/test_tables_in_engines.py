"""Tables of rows in an engine: their share of the RAM, in the plan and in fact."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from moeinf.offload.format import row_table
from moeinf.offload.format.row_table import KEY_BYTES
from moeinf.offload.store import table_cache
from moeinf.offload.store.table_cache import CachedTable
from moeinf.runtime.config import EngineConfig, Settings
from moeinf.runtime.engine import loader
from moeinf.runtime.engine.engine import Engine
from moeinf.runtime.library.library import Library
from scripts.make_checkpoint import byte_tokenizer
from tests.conftest import endless, pull
from tests.generating import answering
from tests.tiny import save_tiny

PROMPT = [(7 * i + 3) % 97 for i in range(40)]


def test_two_tables_share_their_ram(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each caches 30 rows, or all of them; the tokens are the same."""
    save_tiny("qwen4-two-tables", tmp_path / "checkpoint", seed=3)
    byte_tokenizer().save(str(tmp_path / "checkpoint" / "tokenizer.json"))
    settings, opened = Settings(tmp_path / "home"), list[CachedTable]()
    manifest = pull(tmp_path / "checkpoint", settings, "tiny:f32")
    first, second = manifest.tables
    landing = 4 * first.block_bytes
    for module in (row_table, table_cache):
        monkeypatch.setattr(module, "LANDING_BYTES", landing)

    class Watched(CachedTable):
        def __init__(self, *given: Any, **named: Any) -> None:
            opened.append(self)
            super().__init__(*given, **named)

    monkeypatch.setattr(loader, "CachedTable", Watched)
    each = first.row_bytes + KEY_BYTES
    assert second.row_bytes == first.row_bytes
    answers, planned, held = [], [], []
    for rows in (30, 1 << 20):
        opened.clear()
        config = EngineConfig(table_bytes=2 * (landing + rows * each), context=100)
        folder = Library(settings).folder(manifest.model)
        with Engine.open(manifest, folder, config, settings) as engine:
            planned.append(engine.info.placement)
            held.append([t._landings.nbytes + t._cache.nbytes + t._keys.nbytes for t in opened])
            endless(engine)
            answer = answering(engine, PROMPT, 12)
            list(answer)
            answers.append(answer.tokens)
            assert all(table.reads > 0 for table in opened)
    whole = [landing + sum(table.rows) * each for table in (first, second)]
    assert held == [[landing + 30 * each] * 2, whole]
    assert [one.table_bytes for one in planned] == [2 * (landing + 30 * each), sum(whole)]
    assert planned[1].peak_bytes - planned[0].peak_bytes == sum(whole) - sum(held[0])
    assert answers[0] == answers[1]
