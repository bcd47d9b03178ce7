"""Test that a running engine's memory changes, up and down, without another token or more RSS."""

from __future__ import annotations

import random
import subprocess
import sys
import threading
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moeinf.offload.policy.names import POLICY_NAMES
from moeinf.offload.store.budget import DoesNotFit
from moeinf.runtime.config import EngineConfig, Settings
from moeinf.runtime.engine.engine import Engine
from moeinf.runtime.engine.memory_watch import EVERY_S, PATIENCE_S, MemoryWatch
from moeinf.runtime.engine.moving_memory import MovingMemory
from moeinf.runtime.invalid import InvalidValue
from moeinf.runtime.library.library import Library
from moeinf.runtime.sizes import MemorySize, parse_memory
from scripts.make_checkpoint import config, make_checkpoint
from tests.conftest import pull

Open = Callable[..., Engine]
SIZES = ["12%", "100%", "30%", "60%", "12%", "45%"]


def logits(engine: Engine, between: Callable[[int], None] = lambda _: None) -> list[bytes]:
    """Return the bits of each step's logits; between(step) is called before each."""
    state = engine.new_state()
    number = engine.begin_request(state)
    found = [engine.extend(state, list(range(3, 40))).tobytes()]
    for step in range(12):
        between(step)
        found.append(engine.step([(state, 5 + 7 * step)]).tobytes())
    engine.end_request(number, counts=False)
    return found


@pytest.mark.parametrize("policy", sorted(POLICY_NAMES))
def test_every_policy_gives_the_same_bits(open_engine: Open, policy: str) -> None:
    want = logits(open_engine(memory="100%", context=64, trace=False))
    for first in ("100%", "20%"):
        engine = open_engine(memory=first, context=64, trace=False, policy=policy)

        def move(step: int, engine: Engine = engine) -> None:
            if step % 2 == 0:
                engine.set_memory(parse_memory(SIZES[step // 2]))
                assert engine.store.resident <= engine.info.slots
                assert engine.info.slots == engine.store.host.slots == engine.memory.slots

        assert logits(engine, move) == want
        assert engine.memory.moves.grown >= 2
        assert engine.memory.moves.shrunk >= 2
        engine.close()


def test_experts_stay_and_leave(open_engine: Open) -> None:
    """Without pressure nothing is lost by growing; shrinking keeps as many as fit."""
    engine = open_engine(memory="30%", context=64, trace=False)
    logits(engine)
    before = engine.store.resident
    engine.set_memory(MemorySize(share=0.6))
    assert engine.store.resident == before
    logits(engine)
    assert engine.store.resident > before
    small = engine.info.manifest.slots.min_bytes
    engine.set_memory(MemorySize(bytes=small))
    assert engine.store.resident <= engine.info.slots == engine.info.manifest.slots.min_slots
    with pytest.raises(DoesNotFit):
        engine.set_memory(MemorySize(bytes=small - 1))
    assert sum(line.startswith("experts in RAM: ") for line in engine.take_notes()) == 2


def test_moves_from_other_threads(open_engine: Open) -> None:
    """A thread that moves all the time gets its turn, and changes no bit."""
    engine = open_engine(memory="50%", context=64, trace=False)
    want = logits(open_engine(memory="100%", context=64, trace=False))
    ended, made = threading.Event(), [0]

    def move() -> None:
        chance = random.Random(4)
        while not ended.is_set():
            engine.set_memory(MemorySize(share=chance.uniform(0.1, 1)))
            made[0] += 1

    mover = threading.Thread(target=move)
    mover.start()
    try:
        for _ in range(4):
            assert logits(engine) == want
    finally:
        ended.set()
        mover.join(30)
    assert not mover.is_alive()
    assert made[0] >= 10
    engine.memory.close()
    with pytest.raises(InvalidValue):
        engine.set_memory(MemorySize(share=0.5))


def test_a_mover_gets_its_turn() -> None:
    """Passes without a pause do not keep a move waiting."""
    sizes = list[int]()
    memory = MovingMemory(8, lambda slots: sizes.append(slots) or slots, lambda _: None)
    ended = threading.Event()

    def passes() -> None:
        while not ended.is_set():
            with memory:
                np.ones(1000).sum()

    runner = threading.Thread(target=passes)
    runner.start()
    mover = threading.Thread(target=lambda: [memory.move(n, "test") for n in range(1, 50)])
    mover.start()
    mover.join(20)
    ended.set()
    runner.join(20)
    assert not mover.is_alive()
    assert sizes == list(range(1, 50))


class Machine:
    """A machine of 1,000 bytes whose experts have 10 bytes each."""

    def __init__(self, slots: int, others: int) -> None:
        self.others, self.now, self.lines = others, 0.0, list[str]()
        self.memory = MovingMemory(slots, lambda count: count, self.lines.append)
        self.watch = MemoryWatch(
            self.memory, 10, 4, free=self.free, total=1000, now=lambda: self.now
        )

    def free(self) -> int:
        return 1000 - self.others - 10 * self.memory.slots

    def wait(self, seconds: float) -> list[int]:
        """Return the slots after each look."""
        found = []
        for _ in range(round(seconds / EVERY_S)):
            self.now += EVERY_S
            self.watch.look()
            found.append(self.memory.slots)
        return found


def test_memory_is_given_back_and_taken_back_slowly() -> None:
    machine = Machine(slots=40, others=450)
    assert set(machine.wait(60)) == {40}  # 15 % is free
    machine.others = 560  # 4 %
    assert machine.wait(2) == [31]  # 13 %: the least that gives 12.5
    machine.others = 1000
    assert machine.wait(2) == [4]  # it never gives up what it needs
    assert set(machine.wait(60)) == {4}
    machine.others = 300
    slots = machine.wait(20 * PATIENCE_S)
    steps = [b - a for a, b in pairwise(slots) if a != b]
    assert set(steps) == {2}  # a twentieth at a time
    assert slots[-1] == 40
    assert slots.count(10) * EVERY_S >= PATIENCE_S
    assert machine.memory.moves.shrunk == 2
    assert len(machine.lines) == machine.memory.moves.grown + 2


def test_it_does_not_swing() -> None:
    """It gives nothing back at once that it has taken back."""
    machine = Machine(slots=40, others=560)
    slots = machine.wait(600)
    assert slots == [31] * len(slots)


RSS = """
import sys
from pathlib import Path
from moeinf.runtime.config import EngineConfig, Settings
from moeinf.runtime.engine.engine import Engine
from moeinf.runtime.library.library import Library
from moeinf.runtime.sizes import MemorySize, parse_memory

def rss():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

def peak():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))

settings = Settings(Path(sys.argv[1]))
manifest, folder = Library(settings).read(sys.argv[2])
config = EngineConfig(memory=parse_memory("100%"), context=64, trace=False, window=256)
with Engine.open(manifest, folder, config, settings) as engine:
    state = engine.new_state()
    def all_layers():
        engine.extend(state, [3 + i * 7 % 200 for i in range(40)])
        state.truncate(0)
    all_layers()
    for share in (0.25, 1.0, 0.25):
        before, held = rss(), engine.store.resident
        engine.set_memory(MemorySize(share=share))
        freed, gone = before - rss(), held - engine.store.resident
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins again
        for _ in range(3):
            all_layers()
        size = engine.info.slot_bytes
        print(freed, gone * size, rss() - before, engine.info.peak_bytes - peak())
"""


@pytest.mark.linux("reads /proc")
@pytest.mark.full
def test_memory_goes_to_the_system(tmp_path: Path) -> None:
    """After each move the peak RSS is within the promise, and freed slots are really free."""
    make_checkpoint(tmp_path / "checkpoint", config(4, 32, 512, 512, 4))
    pull(tmp_path / "checkpoint", Settings(tmp_path / "home"), "wide:bf16")
    ran = subprocess.run(
        [sys.executable, "-c", RSS, str(tmp_path / "home"), "wide:bf16"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    rows = [[int(word) for word in line.split()] for line in ran.stdout.splitlines()]
    assert len(rows) == 3
    assert all(row[3] >= 0 for row in rows)  # within the promise
    for freed, left, later, _ in rows[::2]:
        assert left > 30 << 20
        assert freed >= 0.95 * left
        assert later <= -0.8 * left  # and it does not come back


def test_a_gpu_keeps_its_memory() -> None:
    memory = MovingMemory(8, lambda slots: slots, lambda _: None, "a GPU has locked it")
    with pytest.raises(InvalidValue, match="a GPU has locked it"):
        memory.move(4, "test")


def test_engines_without_a_size_watch(demo_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looked = threading.Event()
    monkeypatch.setattr(MemoryWatch, "look", lambda _: looked.set())
    monkeypatch.setattr("moeinf.runtime.engine.memory_watch.EVERY_S", 0.01)
    settings = Settings(demo_home)
    manifest, folder = Library(settings).read("demo")
    options: Any = {"context": 64, "trace": False}
    with Engine.open(manifest, folder, EngineConfig(**options), settings) as engine:
        assert looked.wait(10)
        engine.set_memory(MemorySize(share=0.5))
        looked.clear()
        assert not looked.wait(0.1)  # the user has decided
        engine.set_memory(None)
        assert looked.wait(10)
        assert engine.info.slots == engine.memory.first_slots
