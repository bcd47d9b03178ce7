"""Checkpoints with scales and weights in different files, and files that arrive one by one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from safetensors.torch import load_file, save_file
from torch import Tensor

from moeinf.runtime.library.sources import LocalSource
from moeinf.runtime.library.staging import StagingFolder
from moeinf.runtime.sizes import Progress


def split_scales(folder: Path, suffix: str) -> None:
    """Move every second weight's scales to the first file, the others to the last one.

    suffix: the end of a scale's name.
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
    """A source whose files appear one by one, like a download's, and are released after use."""

    here: set[Path] = field(default_factory=set)
    most: int = 0

    def bring(self, work: StagingFolder, progress: Progress) -> Iterator[Path]:
        for path in super().bring(work, progress):
            self.here.add(path)
            self.most = max(self.most, len(self.here))
            yield path

    def is_here(self, path: Path) -> bool:
        return path in self.here

    def release(self, path: Path) -> None:
        self.here.remove(path)
        path.unlink()
