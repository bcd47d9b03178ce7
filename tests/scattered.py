"""Checkpoints whose scales lie in other files than their weights, and files that come one by one.

Does not know what scales mean.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from safetensors.torch import load_file, save_file
from torch import Tensor

from moeinf.runtime.library.repack import LocalSource
from moeinf.runtime.library.staging import Workplace
from moeinf.runtime.sizes import Progress


def split_scales(folder: Path, suffix: str) -> None:
    """Every second weight's scales go to a file that comes first, the others' to the last one.

    suffix: how the names of scales end.
    """
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    files: dict[str, dict[str, Tensor]] = {"a": {}, "m": {}, "n": {}, "z": {}}
    for number, name in enumerate(sorted(tensors)):
        where = "mn"[number // 2 % 2]
        if name.endswith(suffix):
            where = "az"[number // 2 % 2]
        files[where][name] = tensors[name]
    index = {}
    for name, held in files.items():
        save_file(held, folder / f"{name}.safetensors")
        index |= dict.fromkeys(held, f"{name}.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))


@dataclass
class OneByOne(LocalSource):
    """Files appear one after the other, as a download brings them, and go when they may."""

    here: set[Path] = field(default_factory=set)
    most: int = 0

    def bring(self, work: Workplace, progress: Progress) -> Iterator[Path]:
        for path in super().bring(work, progress):
            self.here.add(path)
            self.most = max(self.most, len(self.here))
            yield path

    def is_here(self, path: Path) -> bool:
        return path in self.here

    def release(self, path: Path) -> None:
        self.here.remove(path)
        path.unlink()
