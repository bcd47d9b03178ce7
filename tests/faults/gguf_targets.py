"""The fuzzer's target of GGUF files, and its seeds."""

from __future__ import annotations

import tempfile
from pathlib import Path

from gguf import GGMLQuantizationType as Kind

from moeinf.models.base import ModelDataError
from moeinf.models.families import family_of
from moeinf.runtime.checkpoints.checkpoint import BadCheckpoint
from moeinf.runtime.checkpoints.encode import encoded
from moeinf.runtime.checkpoints.inventory import take_inventory
from moeinf.runtime.gguf.checkpoint import open_gguf
from moeinf.runtime.gguf.tags import best_tag, describe_loss
from scripts.make_checkpoint import config, make_checkpoint
from tests.gguf_files import matrices, write_gguf

_MOST_BYTES = 1 << 20


def _gguf(data: bytes, folder: Path) -> None:
    """Read a file as a checkpoint, and its first expert."""
    path = folder / "x.gguf"
    path.write_bytes(data)
    checkpoint = open_gguf(path)
    assert all(t.offset + t.size_bytes <= len(data) for t in checkpoint.all_stored())
    best_tag(checkpoint.experts.values())
    inventory = take_inventory(family_of(checkpoint.config), checkpoint)
    describe_loss(inventory, "Q4")
    for tensor in (*inventory.dense.values(), *next(iter(inventory.experts.values())).values()):
        if tensor.size_bytes < _MOST_BYTES:
            list(encoded(tensor, "F32"))


def _seeds() -> list[bytes]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_checkpoint(folder / "x", config(1, 2, 32, 32, 1) | {"vocab_size": 64})
        files = [
            write_gguf(folder / "x", folder / f"{kind.name}.gguf", matrices(kind), tokens=tokens)
            for kind, tokens in ((Kind.F16, False), (Kind.Q4_0, True))
        ]
        make_checkpoint(folder / "y", config(1, 2, 64, 64, 1) | {"vocab_size": 64})
        files.append(
            write_gguf(folder / "y", folder / "y.gguf", matrices(Kind.NVFP4), tokens=False)
        )
        return [*(file.read_bytes() for file in files), b"GGUF\x03\0\0\0" + bytes(40)]


# Arguments of a Target in targets.py: check, allowed errors, seeds.
GGUF_TARGETS = {"gguf": (_gguf, (BadCheckpoint, ModelDataError), _seeds)}
