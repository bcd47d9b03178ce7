"""Files that claim more than they hold: the command refuses them in bounded memory."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from scripts.make_checkpoint import config
from tests.cli.conftest import COMMAND, environment
from tests.runtime.gguf.claims import split, stacked

pytest.importorskip("resource", reason="needs limits of processes, which Windows lacks")
MOST_BYTES = 640 << 20  # torch needs some 300 MiB of them
LONG = 3 << 30
READ_BINS = """
import sys
from pathlib import Path
from moeinf.runtime.checkpoints.checkpoint import BadCheckpoint
from moeinf.runtime.checkpoints.torch_bin import read_torch_file
for path in sys.argv[1:]:
    try:
        read_torch_file(Path(path))
    except BadCheckpoint as error:
        print(str(error)[:200], file=sys.stderr)
"""


# A process of its own measures: a child of this one begins with the memory of all tests before.
MEASURED = """
import resource, subprocess, sys
resource.setrlimit(resource.RLIMIT_AS, (6 << 30,) * 2)  # to protect the machine
code = subprocess.run(sys.argv[1:]).returncode
print(code, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss << 10)
"""


def peak_of(command: list[str], home: Path) -> tuple[int, str, int]:
    """Return a command's exit code, its words and its peak memory in bytes."""
    done = subprocess.run(
        [sys.executable, "-c", MEASURED, *command],
        env=environment(home), capture_output=True, text=True, check=True,
    )  # fmt: skip
    code, peak = map(int, done.stdout.split()[-2:])
    return code, done.stderr, peak


def many_experts(folder: Path, layers: int, experts: int) -> Path:
    """Write a checkpoint with a config of many experts and without their weights."""
    sizes = {"num_hidden_layers": layers, "num_experts": experts}
    (folder / "config.json").write_text(json.dumps(config(1, 2, 32, 32, 1) | sizes))
    save_file({"model.norm.weight": torch.ones(32)}, folder / "model.safetensors")
    return folder


CLAIMS: dict[str, Callable[[Path], Path]] = {
    "10^7 stacked experts": lambda folder: stacked(folder / "x.gguf", 10**7),
    "2^16 stacked experts in 9 layers": lambda folder: stacked(folder / "x.gguf", 1 << 16, 9),
    "40 parts of 1.4 million values": lambda folder: split(folder, 40, 1_400_000),
    "2^28 experts in a config": lambda folder: many_experts(folder, 1 << 10, 1 << 16),
}


@pytest.mark.linux("reads the peak memory of a process")
@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=pytest.mark.full) if "9 layers" in n else n for n in CLAIMS],
)
def test_a_file_that_claims_much_is_refused(name: str, tmp_path: Path) -> None:
    (tmp_path / "files").mkdir()
    path = CLAIMS[name](tmp_path / "files")
    code, words, peak = peak_of([*COMMAND, "plan", str(path)], tmp_path / "home")
    assert (code, "bug" in words) == (1, False), words
    assert peak <= MOST_BYTES


class Call:
    """An object whose pickle calls a function."""

    def __init__(self, function: object, *arguments: object) -> None:
        self.called = function, arguments

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return self.called


def lists(count: int) -> bytes:
    """Return a pickle of a list of `count` empty lists, in two bytes each."""
    return b"\x80\x02](" + b"]" * count + b"e."


def copies(count: int) -> bytes:
    """Return a pickle that copies a list of `count` pairs into as many dictionaries."""
    pair = b"X\1\0\0\0aK\1\x86q\2"
    start = b"\x80\x02ccollections\nOrderedDict\nq\0](" + pair + b"h\2" * (count - 1) + b"e\x85q\1"
    return start + b"0" + b"h\0h\1R" * count + b"."


PICKLES: dict[str, Callable[[], bytes]] = {
    "3 GB in 40 bytes": lambda: pickle.dumps(Call(bytearray, 3_000_000_000), 2),
    "a tensor of its own": lambda: pickle.dumps(Call(torch.Tensor, 800_000_000), 2),
    "40 million lists": lambda: lists(40_000_000),
    "copies of a list": lambda: copies(100_000),
    "a high place in the memo": lambda: b"\x80\x02]r\xff\xff\xff\x7f.",
}


def zipped(data: bytes, path: Path) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("x/data.pkl", data)
        archive.writestr("x/version", "3\n")
    return path


def with_long_record(path: Path) -> Path:
    """Write a file whose record `byteorder`, which torch reads whole, has 3 GiB."""
    data = _saved(path)
    start = int.from_bytes(data[-6:-2], "little")  # of the directory
    at = data.index(b"PK\1\2", data.index(b"/byteorder", start) - 100)
    data[at + 20 : at + 28] = LONG.to_bytes(4, "little") * 2
    data[-6:-2] = (start + LONG).to_bytes(4, "little")
    return _with_hole(path, data, start)


def with_long_directory(path: Path) -> Path:
    """Write a file whose directory, which zipfile reads whole, has 3 GiB."""
    data = _saved(path)
    data[-10:-2] = LONG.to_bytes(4, "little") + (16).to_bytes(4, "little")
    return _with_hole(path, data, len(data) - 22)


def _saved(path: Path) -> bytearray:
    torch.save({"a": torch.ones(2)}, path)
    return bytearray(path.read_bytes())


def _with_hole(path: Path, data: bytes, at: int) -> Path:
    with path.open("wb") as file:
        file.write(data[:at])
        file.seek(LONG, os.SEEK_CUR)
        file.write(data[at:])
    return path


@pytest.mark.linux("reads the peak memory of a process")
def test_a_bin_file_that_builds_much_is_refused(tmp_path: Path) -> None:
    paths = [zipped(make(), tmp_path / f"{n}.bin") for n, make in enumerate(PICKLES.values())]
    paths.append(with_long_record(tmp_path / "record.bin"))
    paths.append(with_long_directory(tmp_path / "directory.bin"))
    code, words, peak = peak_of([sys.executable, "-c", READ_BINS, *map(str, paths)], tmp_path)
    assert code == 0, words
    told = words.splitlines()
    assert [path.name for path, line in zip(paths, told, strict=True) if path.name in line] == [
        path.name for path in paths
    ]
    assert peak <= MOST_BYTES
