"""python -m benchmarks.tables: decode with a table on disk, and with the same table in RAM.

The model has the widths of Qwen3.8-Flash-Next, few of its layers and experts, and a smaller table.
So a token takes a small part of its real time, and the table's part is larger than in the model.
Tokens are random: hardly an n-gram comes twice. With the least cache every row is read from disk.
Both engines take turns, token by token, and their logits are compared bit for bit. The ratio of a
round is the median of those of its tokens, so that what slows the machine for a while slows both.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor

from benchmarks.models import RaceModel
from benchmarks.shapes import Config
from moeinf.native import SHARD_DATA_OFFSET
from moeinf.offload.format.row_table import RowTable
from moeinf.offload.store.table_cache import CachedTable
from moeinf.runtime.config import EngineConfig, read_environment
from moeinf.runtime.engine import loader
from moeinf.runtime.engine.engine import Engine
from moeinf.runtime.jobs.bench import machine
from moeinf.runtime.sizes import parse_memory, parse_size

_ROUND = 16  # tokens of a round


def config(layers: int, experts: int, base: int, ngram_layer: int) -> Config:
    """Return a model's config; base: rows of each of the table's 16 heads, about."""
    return {
        "model_type": "qwen4_exp_text",
        "hidden_size": 2560,
        "num_hidden_layers": layers,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "moe_intermediate_size": 640,
        "shared_expert_intermediate_size": 640,
        "num_experts": experts,
        "num_experts_per_tok": 4,
        "vocab_size": 4096,
        "max_position_embeddings": 4096,
        "ple_layer_ids": [ngram_layer],
        "ngram_vocab_size_base": base,
        "split_ngram_parts": 64,
        "eos_token_id": 0,
        "indexer_n_heads": 16,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 128,
        "indexer_budget": 2048,
        "indexer_compress_ratio": 16,
        "rope_parameters": {"rope_theta": 1e7, "partial_rotary_factor": 0.25},
    }


class TableInRam:
    """A table whose stored rows are all in memory, in place of CachedTable."""

    def __init__(
        self,
        table: RowTable,
        folder: Path,
        paths: list[str],
        widen: Callable[[Tensor], Tensor],
        *_: object,
        **__: object,
    ) -> None:
        found = []
        for path, count in zip(paths, table.rows, strict=True):
            blocks = np.fromfile(folder / path, np.uint8, offset=SHARD_DATA_OFFSET)
            blocks = blocks.reshape(-1, table.block_bytes)
            rows = blocks[:, : table.block_rows * table.row_bytes].reshape(-1, table.row_bytes)
            found.append(rows[:count])
        self._rows, self._widen = torch.from_numpy(np.concatenate(found)), widen

    def ahead(self, ids: Tensor) -> None:
        """Do nothing: all rows are here."""

    def rows(self, ids: Tensor) -> Tensor:
        return self._widen(self._rows[ids])


class Counted(CachedTable):
    """A CachedTable that is found again."""

    last: CachedTable

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        Counted.last = self


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--experts", type=int, default=16)
    parser.add_argument("--rows", type=int, default=200_000, help="of each of 16 heads")
    parser.add_argument("--ngram-layer", type=int, default=1, help="1: nothing runs before it")
    parser.add_argument("--table-memory", default="1MiB", help="of RAM for rows")
    parser.add_argument("--tag", default="bf16")
    parser.add_argument("--tokens", type=int, default=192)
    parser.add_argument("--buffered", action="store_true", help="read through the page cache")
    parser.add_argument("--cache", type=Path, default=read_environment().home / "benchmarks")
    print(json.dumps(measured(parser.parse_args()), indent=1))


def measured(o: argparse.Namespace) -> dict[str, Any]:
    """Return the times of a token, and what was read for it."""
    about = config(o.layers, o.experts, o.rows, o.ngram_layer)
    name = f"table-{o.layers}-{o.experts}-{o.rows}-{o.ngram_layer}"
    model = RaceModel(o.cache, name, about)
    manifest, folder = model.ours(o.tag), model.folder(o.tag)
    limits = EngineConfig(
        memory=parse_memory("100%"), context=1024, trace=False, device="cpu",
        direct_io=not o.buffered, table_bytes=parse_size(o.table_memory),
    )  # fmt: skip
    draw, seconds = random.Random(1), dict[str, list[float]]()
    with ExitStack() as opened:
        engines: dict[str, Engine] = {}
        for place, kind in (("disk", Counted), ("ram", TableInRam)):
            with mock.patch.object(loader, "CachedTable", kind):
                engine = Engine.open(manifest, folder, limits, model.settings)
            engines[place] = opened.enter_context(engine)
            seconds[place] = []
        states = {place: engine.new_state() for place, engine in engines.items()}
        prompt = [draw.randrange(4096) for _ in range(64)]
        last = {place: engine.extend(states[place], prompt) for place, engine in engines.items()}
        reads = Counted.last.reads
        for turn in range(o.tokens):
            token = draw.randrange(4096)
            for place in sorted(engines, reverse=turn % 2 == 1):
                start = time.perf_counter()
                last[place] = engines[place].extend(states[place], [token])
                seconds[place].append(time.perf_counter() - start)
            assert np.array_equal(last["disk"], last["ram"])
        reads = Counted.last.reads - reads
    times = {place: statistics.median(each) for place, each in seconds.items()}
    pairs = [disk / ram for disk, ram in zip(seconds["disk"], seconds["ram"], strict=True)]
    starts = range(0, len(pairs) - _ROUND + 1, _ROUND)
    ratios = [statistics.median(pairs[start : start + _ROUND]) for start in starts]
    return {
        "machine": machine(),
        "table_bytes": sum(table.disk_bytes for table in manifest.tables),
        "blocks_read_per_token": round(reads / len(seconds["disk"]), 2),
        "ms_per_token": {place: round(1e3 * each, 3) for place, each in times.items()},
        "disk_to_ram": round(times["disk"] / times["ram"], 4),
        "rounds": len(ratios),
        "disk_to_ram_in_rounds": {
            "median": round(statistics.median(ratios), 4),
            "least": round(min(ratios), 4),
            "most": round(max(ratios), 4),
        },
    }


if __name__ == "__main__":
    main()
