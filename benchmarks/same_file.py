"""python -m benchmarks.same_file SHAPE: the same GGUF file in ours and in llama.cpp, in RAM.

The file: our random weights in bfloat16, exported by ours and quantised by llama.cpp itself. Ours
pulls it like any file and keeps its blocks. Then both decode the same tokens in alternation. The
pull is timed, and then a copy of the file to the same folder, both flushed to disk.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.cold import forget_pages
from benchmarks.models import RaceModel
from benchmarks.race import Rounds, Tokens, race_decode, race_prefill
from benchmarks.shapes import SHAPES, shape
from benchmarks.worker import Worker
from moeinf.runtime.config import Settings, read_environment
from moeinf.runtime.hub.resolve import find_source
from moeinf.runtime.jobs.bench import machine, read_ceiling
from moeinf.runtime.jobs.export_gguf import export_gguf
from moeinf.runtime.library.library import Library
from moeinf.runtime.library.manifest import Manifest
from moeinf.runtime.library.repacking.repack import repack


def _quiet(*_: object) -> None:
    """Report nothing."""


_FTYPES = {"Q4_0": 2, "Q8_0": 7, "Q4_K_M": 15, "Q5_K_M": 17, "Q6_K": 18}  # llama_ftype


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("shape", choices=list(SHAPES))
    parser.add_argument("--layers", type=int, help="fewer than the real shape has")
    parser.add_argument("--type", default="Q4_K_M", choices=list(_FTYPES))
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--prompt", type=int, default=128, help="tokens")
    parser.add_argument("--prefills", type=int, default=2, help="rounds")
    parser.add_argument("--decodes", type=int, default=6, help="rounds")
    parser.add_argument("--pulls", type=int, default=0, help="rounds")
    parser.add_argument("--kernels", default="", help="our path, if not the fastest")
    parser.add_argument("--make-only", action="store_true")
    parser.add_argument("--cache", type=Path, default=read_environment().home / "benchmarks")
    o = parser.parse_args()
    name = o.shape if o.layers is None else f"{o.shape}-{o.layers}"
    model = RaceModel(o.cache, name, shape(o.shape, o.layers))
    file = quantised(model, o.type)
    ours = pulled(model, file)
    if o.make_only:
        return
    result: dict[str, Any] = {
        "file": file.name,
        "bytes": file.stat().st_size,
        "tag": str(ours.model),
        "threads": o.threads,
        "machine": machine(),
        "command": " ".join(["python -m benchmarks.same_file", *sys.argv[1:]]),
    }
    if o.decodes:
        result |= raced(o, model.settings, ours, file)
    if o.pulls:
        result["pull"] = [pull_and_copy(model, file) for _ in range(o.pulls)]
    print(json.dumps(result, indent=1))


def quantised(model: RaceModel, kind: str) -> Path:
    """Return llama.cpp's file of the model, made unless it exists."""
    file, plain = model.gguf(kind), model.gguf("exported")
    if file.exists():
        return file
    file.parent.mkdir(parents=True, exist_ok=True)
    if not plain.exists():
        manifest = model.ours("bf16")
        export_gguf(model.folder("bf16"), manifest, plain, _quiet, _quiet, force=False)
    partial_file = file.with_suffix(".partial")
    subprocess.run(
        [sys.executable, "-c", _QUANTISE, str(plain), str(partial_file), str(_FTYPES[kind])],
        check=True, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    partial_file.rename(file)
    return file


_QUANTISE = """
import ctypes, os, sys, llama_cpp
params = llama_cpp.llama_model_quantize_default_params()
params.ftype, params.nthread = int(sys.argv[3]), os.cpu_count()
source, target = (name.encode() for name in sys.argv[1:3])
sys.exit(llama_cpp.llama_model_quantize(source, target, ctypes.byref(params)))
"""


def pulled(model: RaceModel, file: Path) -> Manifest:
    """Return our model of the file, pulled unless it exists."""
    settings = model.settings
    name, source = find_source(str(file), file.stem.lower(), settings, _quiet)
    library = Library(settings)
    if (library.folder(name) / "manifest.json").exists():
        return library.read(str(name))[0]
    return repack(source, library, name, _quiet, _quiet)


def raced(o: argparse.Namespace, settings: Settings, ours: Manifest, file: Path) -> dict[str, Any]:
    """Race prefill and decode."""
    rounds = Rounds(o.prompt, o.prefills, o.decodes)
    sizes = ["--threads", str(o.threads), "--context", str(rounds.context)]
    mine = [sys.executable, "-m", "benchmarks.ours", str(settings.home), str(ours.model), *sizes]
    mine += ["--kernels", o.kernels]
    its = [sys.executable, "-m", "benchmarks.peers.llama_cpp", str(file), *sizes]
    tokens = Tokens(256, rounds.seed)
    found: dict[str, Any] = {}
    with Worker(mine) as a, Worker([*its, "--setting", "default"]) as b:
        ceiling = partial(read_ceiling, o.threads)
        found["decode"] = race_decode(a, b, tokens, rounds, ceiling)
        found["prefill"] = race_prefill(a, b, tokens, rounds)
    return found


def pull_and_copy(model: RaceModel, file: Path) -> dict[str, float]:
    """Return the seconds of a pull and of a copy, each of a file that is not in the page cache."""
    settings = Settings(home=model.cache / "pulls")
    shutil.rmtree(settings.home, ignore_errors=True)
    forget_pages(file)
    start = time.perf_counter()
    name, source = find_source(str(file), file.stem.lower(), settings, _quiet)
    repack(source, Library(settings), name, _quiet, _quiet)
    os.sync()
    pull = time.perf_counter() - start
    copy = settings.home / "copy.gguf"
    forget_pages(file)
    start = time.perf_counter()
    shutil.copyfile(file, copy)
    os.sync()
    copied = time.perf_counter() - start
    shutil.rmtree(settings.home)
    return {"pull_s": pull, "copy_s": copied, "of_copy_speed": copied / pull}


if __name__ == "__main__":
    main()
