"""The register of live engines, with real processes that live and die."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from moeinf.runtime.live import LiveEngine, Registry

ENGINE = """
import sys, time
from pathlib import Path
from moeinf.runtime.live import Registry
entry = Registry(Path(sys.argv[1])).register("demo:bf16", lambda claimed: 10 << 40)
print("ready", flush=True)
time.sleep(60)
"""


def test_own_entry_comes_and_goes(tmp_path: Path) -> None:
    registry = Registry(tmp_path / "run")
    entry = registry.register("demo:bf16", lambda claimed: 123 + claimed)
    assert entry is not None
    assert registry.engines() == [LiveEngine(os.getpid(), "demo:bf16", 123)]
    entry.close()
    entry.close()
    assert registry.engines() == []


def test_a_model_that_has_gone_is_not_entered(tmp_path: Path) -> None:
    registry = Registry(tmp_path / "run")
    assert registry.register("demo:bf16", lambda claimed: None) is None
    assert registry.engines() == []


def test_a_killed_engine_leaves_the_register(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    process = subprocess.Popen([sys.executable, "-c", ENGINE, str(folder)], stdout=subprocess.PIPE)
    assert process.stdout is not None
    with process.stdout:
        assert process.stdout.readline() == b"ready\n"
        registry = Registry(folder)
        (engine,) = registry.engines()
        assert engine.pid == process.pid
        assert 9 << 40 < engine.unfilled_bytes() < 10 << 40
        claims: list[int] = []
        assert registry.register("other", lambda claimed: claims.append(claimed)) is None
        assert 9 << 40 < claims[0] < 10 << 40
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert registry.engines() == []
    assert list(folder.glob("*.json")) == []
