"""Print the README's table: the published models that fit in free memory, and their speed.

Nothing is loaded or fetched. Sizes are those that `moeinf plan` derives from a checkpoint's
headers; here the headers come from the published config.json (`benchmarks/shapes.py`).

    python -m benchmarks.ram_table

The tokens/s are bounds from memory traffic alone, for RAM and a drive of the speeds below. The
lower one counts the cache misses of uniformly random routing; the upper one counts no miss. Both
leave out the cost of computing.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.shapes import shape, tensors_of
from moeinf.runtime.checkpoints.checkpoint import Checkpoint, SourceTensor
from moeinf.runtime.config import EngineConfig
from moeinf.runtime.library.manifest import Manifest
from moeinf.runtime.library.repacking.repack import prospects
from moeinf.runtime.library.sources import LocalSource
from moeinf.runtime.names import ModelName
from moeinf.runtime.placement.bandwidth import Speeds
from moeinf.runtime.placement.bounds import seconds_per_token, without_misses
from moeinf.runtime.placement.plan import Placement, place

# The slowest memory and the drive that docs/performance.md and docs/decisions name.
SPEEDS = Speeds(33e9, 2.9e9, "docs/performance.md", "moeinf devices")
CONTEXT = 4096
TAG = "q4"
ROWS = (
    (4, "olmoe"),
    (8, "olmoe"),
    (8, "qwen3-30b-a3b"),
    (16, "deepseek-v2-lite"),
    (16, "qwen3-30b-a3b"),
    (32, "qwen3-30b-a3b"),
    (32, "mixtral-8x7b"),
    (64, "qwen3-235b-a22b"),
)


@dataclass(frozen=True)
class Published:
    """The bytes that `pull` fetches of a published checkpoint, and the manifest that it writes."""

    download_bytes: int
    manifest: Manifest

    @property
    def disk_bytes(self) -> int:
        return self.manifest.slots.max_bytes + self.manifest.dense_bytes


def published(name: str) -> Published:
    """Return the sizes of a shape's checkpoint in bfloat16 and of the model made from it."""
    config = shape(name)
    tensors = {
        key: SourceTensor(key, "BF16", sides, Path(key), 0, 2 * math.prod(sides))
        for key, sides in tensors_of(config)
    }
    source = LocalSource(Checkpoint(Path(), config, tensors), "a published config.json")
    manifest = prospects(source, ModelName(name, TAG))[TAG]
    return Published(sum(tensor.size_bytes for tensor in tensors.values()), manifest)


def tokens_per_s(manifest: Manifest, placement: Placement) -> tuple[float, float]:
    """Return tokens per second with uniformly random routing, and without any cache miss."""
    hits = without_misses(placement, manifest)
    least = 1 / seconds_per_token(placement, manifest, SPEEDS)
    return least, 1 / seconds_per_token(hits, manifest, SPEEDS)


def lines() -> Iterator[str]:
    """Yield the table in Markdown. Raises DoesNotFit for a row whose memory is too little."""
    yield "| free RAM | model (q4) | download | disk | experts in RAM | tokens/s, bounded |"
    yield "|---|---|---|---|---|---|"
    for gigabytes, name in ROWS:
        found = published(name)
        config = EngineConfig(context=CONTEXT, device="cpu")
        placement = place(found.manifest, config, gigabytes << 30, cores=2)
        share = placement.slots / found.manifest.slots.experts
        least, most = tokens_per_s(found.manifest, placement)
        speed = f"{most:.1f}" if share == 1 else f"{least:.1f} to {most:.1f}"
        sizes = f"{found.download_bytes / 1e9:.0f} GB | {found.disk_bytes / 1e9:.1f} GB"
        yield f"| {gigabytes} GiB | `{name}` | {sizes} | {share:.0%} | {speed} |"


if __name__ == "__main__":
    print("\n".join(lines()))
