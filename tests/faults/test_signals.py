"""SIGINT and SIGTERM at every token: the answer ends within a token and leaves nothing."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import pytest
from torch import Tensor

from moeinf.cli.chat.signals import Stopped, interruptible, stoppable
from moeinf.models.base import Phase
from moeinf.runtime.config import Settings
from moeinf.runtime.engine.engine import Engine
from moeinf.runtime.generation.chat import Conversation
from moeinf.runtime.library.processes import Registry
from moeinf.runtime.requests import Limits
from moeinf.runtime.sampling.sampler import SamplingOptions
from tests.cli.conftest import COMMAND, environment
from tests.faults.conftest import STRIDE, Tally
from tests.watched import Watched

PROMPT = "sort owl, fig, zebra, ant"
GREEDY = SamplingOptions(temperature=0)


def orphans(home: Path) -> set[str]:
    """Return template workers of this MOEINF_HOME whose parent has ended."""
    listed = subprocess.run(
        ["ps", "-eo", "ppid,pid,args"], capture_output=True, text=True, check=True
    ).stdout
    rows = [line.split(maxsplit=2) for line in listed.splitlines()]
    found = {pid for parent, pid, args in rows if parent == "1" and "template_worker" in args}
    return {pid for pid in found if os.fsencode(home) in variables_of(pid)}


def variables_of(pid: str) -> bytes:
    """Return a process's environment, or nothing if the process has just ended."""
    with suppress(OSError):
        return Path("/proc", pid, "environ").read_bytes()
    return b""


def held() -> tuple[int, int]:
    """Count descriptors except those of shards, and threads.

    Garbage of earlier tests is collected first.
    """
    gc.collect()
    links = [str(p.readlink()) for p in Path("/proc/self/fd").iterdir() if p.is_symlink()]
    shards = sum(link.endswith(".safetensors") for link in links)
    return len(links) - shards, sum(1 for _ in Path("/proc/self/task").iterdir())


@pytest.mark.linux("reads /proc")
@pytest.mark.parametrize("kind", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_at_every_token(
    kind: signal.Signals, open_engine: Callable[..., Engine], tally: Tally
) -> None:
    """The signal comes during the computation of the next token."""
    engine = open_engine(memory="10%", speculation=False)  # so a pass is a token
    right = "".join(Conversation(engine).ask(PROMPT, GREEDY, Limits()))
    at = passed = last = 0

    class Killing(Watched):
        def begin_pass(self, rows: Tensor, phase: Phase, pieces: Sequence[slice] = ()) -> None:
            nonlocal passed
            passed += 1
            if passed == at:
                os.kill(os.getpid(), kind)
            super().begin_pass(rows, phase, pieces)

    before = held()
    with engine.routed_through(Killing):
        for at in range(1, 30):
            talk, passed, said = Conversation(engine), 0, ""
            try:
                with stoppable(), interruptible() as pressed:
                    answer = talk.ask(PROMPT, GREEDY, Limits(), pressed)
                    for piece in answer:
                        said += piece
            except Stopped:
                tally("ended by SIGTERM")
            assert engine.store.idle
            assert right.startswith(said)
            if passed < at:
                assert said == right
                last, at = at, 0
                break
            assert (answer.finish_reason, len(answer.tokens)) == ("interrupted", at - 1)
            if kind == signal.SIGINT:
                tally("ended by SIGINT")
            passed = at  # no more signals
            assert "".join(talk.ask(PROMPT, GREEDY, Limits()))  # the same conversation continues
        else:
            raise AssertionError("the answer has no end")
    assert last > 15
    assert "".join(Conversation(engine).ask(PROMPT, GREEDY, Limits())) == right
    until = time.monotonic() + 10
    while held() != before and time.monotonic() < until:
        time.sleep(0.1)  # threads of earlier tests may hold a descriptor for a moment
    assert held() == before


@pytest.mark.linux("reads /proc")
@pytest.mark.parametrize("kind", [signal.SIGINT, signal.SIGTERM])
def test_a_process_that_is_told_to_end(
    kind: signal.Signals, every_point: bool, demo_home: Path, tally: Tally
) -> None:
    """At several moments of `moeinf run`: an exit code, no child, no entry in the register."""
    moments = {0, 3, *range(0, 24, STRIDE)} if every_point else {0, 3}
    before = orphans(demo_home)
    for moment in sorted(moments):
        process = subprocess.Popen(
            [*COMMAND, "run", "demo", PROMPT, "--memory", "10%"],
            env=environment(demo_home), stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
        )  # fmt: skip
        assert process.stdout is not None
        if moment:
            os.read(process.stdout.fileno(), 1)
            time.sleep(0.004 * (moment - 1))
        else:
            time.sleep(0.5)
        process.send_signal(kind)
        _, error = process.communicate(timeout=60)
        assert process.returncode in (0, 130, 143, -kind), error  # -kind: during the import
        assert b"Traceback" not in error
        tally(f"exit code {process.returncode}")
    assert Registry(Settings(demo_home).run).engines() == []
    assert orphans(demo_home) <= before
