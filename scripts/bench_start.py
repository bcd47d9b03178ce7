"""Measure how long commands take to start, and when `run` shows its first token.

Run: python scripts/bench_start.py [--model demo] [--rounds 9] [--prompt "17+25="]
Each round starts every command once, in turn; the page cache holds all files after the first round,
which does not count. Prints medians in seconds, with the least and the most:

    torch         until `import torch` has ended in a new process
    imports       the same for all that `run` imports before it opens an engine
    bytes         the model's files, read once from the page cache
    first token   `moeinf run MODEL PROMPT` until its first byte of text
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

from moeinf.runtime.config import read_environment
from moeinf.runtime.library.library import Library

COMMAND = [sys.executable, "-c", "from moeinf.cli.entry import main; main()"]
LIGHT = ("--help", "list", "ps")
IMPORTS = """
from moeinf.cli.imports import uncollected
with uncollected():
    import moeinf.cli.commands.run, moeinf.cli.chat.local"""
_SAY = "print('imported', flush=True)"
_BLOCK_BYTES = 16 << 20


def started(command: list[str], first_byte: bool = False) -> float:
    """Return the seconds until a process ends, or until it prints a byte. It must succeed."""
    environment = {**os.environ, "MOEINF_NO_SERVER": "1"}
    begun = time.perf_counter()
    with subprocess.Popen(
        command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        if first_byte:
            assert process.stdout.read(1)
            seconds = time.perf_counter() - begun
        process.stdout.read()
        if not first_byte:
            process.wait()
            seconds = time.perf_counter() - begun
    assert process.returncode == 0, command
    return seconds


def read_once(folder: Path) -> float:
    """Return the seconds that reading all files below `folder` takes."""
    buffer = bytearray(_BLOCK_BYTES)
    begun = time.perf_counter()
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            with path.open("rb", buffering=0) as file:
                while file.readinto(buffer):
                    pass
    return time.perf_counter() - begun


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="demo")
    parser.add_argument("--prompt", default="17+25=")
    parser.add_argument("--rounds", type=int, default=9)
    o = parser.parse_args()
    python = [sys.executable, "-c"]
    run = [*COMMAND, "run", o.model, o.prompt, "--quiet"]
    started(run)  # it may have to be pulled
    folder = Library(read_environment()).read(o.model)[1]
    ways: dict[str, Callable[[], float]] = {
        "python": lambda: started([*python, "pass"]),
        **{name: lambda name=name: started([*COMMAND, name]) for name in LIGHT},
        "torch": lambda: started([*python, f"import torch; {_SAY}"], first_byte=True),
        "imports": lambda: started([*python, f"{IMPORTS}\n{_SAY}"], first_byte=True),
        "bytes": lambda: read_once(folder),
        "first token": lambda: started(run, first_byte=True),
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(o.rounds + 1):
        for name, way in ways.items():
            found = way()
            if number:
                seconds[name].append(found)
    for name, found in seconds.items():
        print(f"{name:12} {median(found):.3f} ({min(found):.3f} to {max(found):.3f})")
    ratios = [
        first / (imports + read)
        for first, imports, read in zip(
            seconds["first token"], seconds["imports"], seconds["bytes"], strict=True
        )
    ]
    print(f"first token ÷ (imports + bytes): {median(ratios):.2f}")


if __name__ == "__main__":
    main()
