"""The models of a race in a cache folder: ours from the ordinary repack, peers' as GGUF.

The folder holds:

    CACHE/noise-<items>.bin          the weights of everything here
    CACHE/checkpoints/<name>/        config.json and a tokenizer; its tensors are spans of the noise
    CACHE/home/models/<name>/<tag>/  ours
    CACHE/gguf/<name>-<type>.gguf    llama.cpp's
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from benchmarks.noise import span_of, write_noise
from benchmarks.shapes import Config, tensors_of
from moeinf.runtime.checkpoints.checkpoint import SINGLE, Checkpoint, SourceTensor
from moeinf.runtime.config import Settings
from moeinf.runtime.library.library import Library
from moeinf.runtime.library.manifest import Manifest, read_manifest
from moeinf.runtime.library.repacking.repack import prospects, repack
from moeinf.runtime.library.sources import LocalSource
from moeinf.runtime.names import ModelName
from moeinf.runtime.sizes import format_bytes
from scripts.make_checkpoint import byte_tokenizer

GGUF_BITS = {"Q4_0": 4.5, "Q8_0": 8.5, "BF16": 16.0, "F16": 16.0}  # per weight, about
GGUF_OF_TAG = {"q4": "Q4_0", "q8": "Q8_0", "bf16": "BF16"}
_SPARE_BYTES = 2 << 30  # never filled


@dataclass(frozen=True)
class RaceModel:
    """One shape in a cache folder: its name there, and its config.

    given: files of the tensors that are not noise, by checkpoint name; bfloat16 items only.
    more_homes: folders of further drives, over which the experts are spread.
    """

    cache: Path
    name: str
    config: Config
    given: Mapping[str, Path] = field(default_factory=dict)
    more_homes: tuple[Path, ...] = ()

    @property
    def settings(self) -> Settings:
        return Settings(home=self.cache / "home", more_homes=self.more_homes)

    def gguf(self, kind: str) -> Path:
        return self.cache / "gguf" / f"{self.name}-{kind}.gguf"

    def folder(self, tag: str) -> Path:
        return Library(self.settings).folder(ModelName(self.name, tag))

    def weights(self) -> int:
        """Return the number of parameters."""
        return sum(_count(shape) for _, shape in tensors_of(self.config))

    def ours(self, tag: str) -> Manifest:
        """Make our model unless it exists. Raises OSError (ENOSPC) before anything is written."""
        folder = self.folder(tag)
        if not (folder / "manifest.json").exists():
            library, name = Library(self.settings), ModelName(self.name, tag)
            repack(self._source(), library, name, lambda *_: None, lambda *_: None)
        return read_manifest(folder)

    def prospect(self, tag: str) -> Manifest:
        """Return the manifest that `ours` will have, except for its files; makes only the noise."""
        return prospects(self._source(), ModelName(self.name, tag))[tag]

    def peer(self, kind: str, python: str) -> Path:
        """Make the GGUF file unless it exists; `python` must have gguf and llama_cpp."""
        path = self.gguf(kind)
        if path.exists():
            return path
        path.parent.mkdir(parents=True, exist_ok=True)
        check_space(path.parent, int(self.weights() * GGUF_BITS[kind] / 8))
        names = [(name, list(shape)) for name, shape in tensors_of(self.config)]
        given = {name: os.fspath(file) for name, file in self.given.items()}
        about = json.dumps({"config": self.config, "tensors": names, "given": given})
        partial = path.with_suffix(".partial")
        command = [python, "-m", "benchmarks.gguf_file", os.fspath(partial), kind]
        subprocess.run(command, input=about, text=True, check=True, cwd=_ROOT)
        partial.rename(path)
        return path

    def huggingface(self) -> Path:
        """Return a folder that other programs can load: real files, in bfloat16."""
        checkpoint = self._checkpoint()
        path = checkpoint.folder / SINGLE
        if not path.exists():
            sizes = {name: 2 * _count(sides) for name, sides in tensors_of(self.config)}
            check_space(path.parent, sum(sizes.values()))
            header, offset = {}, 0
            for name, sides in tensors_of(self.config):
                span = [offset, offset + sizes[name]]
                header[name] = {"dtype": "BF16", "shape": sides, "data_offsets": span}
                offset = span[1]
            text = json.dumps(header).encode()
            partial = path.with_suffix(".partial")
            with partial.open("wb") as file:
                file.write(len(text).to_bytes(8, "little") + text)
                for name in header:
                    tensor = checkpoint.tensors[name]
                    np.fromfile(
                        tensor.path, np.uint8, tensor.size_bytes, offset=tensor.offset
                    ).tofile(file)
            partial.rename(path)
        return checkpoint.folder

    def _source(self) -> LocalSource:
        return LocalSource(self._checkpoint(), "benchmarks: random weights")

    def _checkpoint(self) -> Checkpoint:
        """Return a checkpoint without weight files: its headers point into the noise."""
        folder = self.cache / "checkpoints" / self.name
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(self.config, indent=1))
        byte_tokenizer().save(os.fspath(folder / "tokenizer.json"))
        shapes = dict(tensors_of(self.config))
        noise = self._noise(max(map(_count, shapes.values())))
        tensors = {}
        for name, sides in shapes.items():
            count = _count(sides)
            path, offset = self.given.get(name), 0
            if path is None:
                path, offset = noise, 2 * span_of(name, count).item
            tensors[name] = SourceTensor(name, "BF16", sides, path, offset, 2 * count)
        return Checkpoint(folder, self.config, tensors)

    def _noise(self, largest: int) -> Path:
        path = self.cache / f"noise-{largest}.bin"
        if not path.exists():
            check_space(self.cache, 2 * largest)
            partial = path.with_suffix(".partial")
            write_noise(partial, largest)
            partial.rename(path)
        return path


_ROOT = Path(__file__).parents[1]


def check_space(folder: Path, needed_bytes: int) -> None:
    """Raise OSError (ENOSPC), with the needed and the free bytes, when the disk is too full."""
    free = shutil.disk_usage(folder).free
    if free < needed_bytes + _SPARE_BYTES:
        text = f"{format_bytes(needed_bytes)} are needed, the disk has {format_bytes(free)} free"
        raise OSError(errno.ENOSPC, f"{text}; the cache may be deleted at any time", str(folder))


def files_of(path: Path) -> list[Path]:
    """Return the file itself, or all files below a folder."""
    return [path] if not path.is_dir() else sorted(p for p in path.rglob("*") if p.is_file())


def bits_per_weight(path: Path, weights: int) -> float:
    """Return the bits on disk per weight, headers included."""
    return 8 * sum(p.stat().st_size for p in files_of(path)) / weights


def _count(shape: tuple[int, ...]) -> int:
    count = 1
    for side in shape:
        count *= side
    return count
