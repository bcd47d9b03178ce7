"""Run an engine whose reads or memory fail, as a separate process with shim.c preloaded.

Usage: python inside.py HOME eio|short|slow|flip|memory STEP. Prints a JSON line with the outcomes
and the number of injections. An answer that differs from the undisturbed one must be an error. The
next answer must be right, with nothing pinned.
"""

from __future__ import annotations

import ctypes
import json
import sys
import time
from collections import Counter
from pathlib import Path

import torch

from moeinf.offload.store.transfer import ExpertReadError
from moeinf.runtime.config import EngineConfig, Settings
from moeinf.runtime.engine.engine import Engine
from moeinf.runtime.generation.chat import Conversation
from moeinf.runtime.library.library import Library
from moeinf.runtime.requests import Limits
from moeinf.runtime.sampling.sampler import SamplingOptions
from moeinf.runtime.sizes import parse_memory
from moeinf.runtime.text.chat_template import TemplateError

# kind of shim_reads, and consecutive reads that fail: the reader retries an EIO twice
KINDS = {"eio": (1, 1), "eio thrice": (1, 60), "short": (2, 4), "slow": (3, 4), "flip": (4, 60)}
HARMLESS = ("eio", "short", "slow")
PROMPT = "sort owl, fig, zebra, ant"


def main() -> None:
    home, what, step = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    shim = ctypes.CDLL(None)
    settings = Settings(home)
    manifest, folder = Library(settings).read("demo:bf16")
    config = EngineConfig(memory=parse_memory("10%"), trace=False)
    if what == "memory":  # oneDNN itself crashes where it has no memory for a primitive
        torch.backends.mkldnn.set_flags(_enabled=False)
    outcomes: Counter[str] = Counter()
    with Engine.open(manifest, folder, config, settings) as engine:

        def ask() -> str:
            talk = Conversation(engine)
            return "".join(talk.ask(PROMPT, SamplingOptions(temperature=0), Limits()))

        def arm(at: int) -> None:
            if what == "memory":
                shim.shim_memory(at)
            else:
                shim.shim_reads(KINDS[what][0], at, KINDS[what][1])

        def disarm() -> int:
            """End the injection, and every read ahead that it may have hit."""
            while engine.store.host.table.loading:
                engine.store.host.settle()
                time.sleep(0.001)
            seen: int = shim.shim_seen()
            shim.shim_reads(0, 0, 0)
            return seen

        right = ask()
        assert right == ask() != ""
        arm(1 << 30)
        ask()
        points = disarm()
        for at in range(1, points + 1, step):
            arm(at)
            try:
                said = ask()
            except ExpertReadError as error:
                assert error.shard.startswith("experts/"), error.shard
                assert what not in HARMLESS, f"{what} at {at}: {error}"
                outcomes["an error that names the shard"] += 1
            except (MemoryError, RuntimeError, TemplateError) as error:
                assert what == "memory", f"{what} at {at}: {error}"
                assert isinstance(error, MemoryError) or "memory" in str(error), error
                outcomes["an error that says memory"] += 1
            else:
                assert said == right, f"{what} at {at}: {said!r}"
                outcomes["the right answer"] += 1
            if disarm() < at:
                outcomes["not met"] += 1
            assert engine.store.idle, f"{what} at {at}: something is pinned"
            again = ask()
            assert again == right, f"after {what} at {at}: {again!r}"
        assert torch.get_num_threads() >= 1
    print(json.dumps({"points": points, "outcomes": outcomes}))


if __name__ == "__main__":
    main()
