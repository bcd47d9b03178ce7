"""The register of live engines, with real processes that start and exit."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from moeinf.runtime.library.processes import Figures, LiveEngine, NotStopped, Registry

ENGINE = """
import sys, time
from pathlib import Path
from moeinf.runtime.library.processes import Registry
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


def test_stop_signals_only_the_process_that_registered(tmp_path: Path) -> None:
    """An entry with another start time belongs to another process, which gets no signal."""
    registry = Registry(tmp_path / "run")
    command = [sys.executable, "-c", ENGINE, str(tmp_path / "run")]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        (path,) = (tmp_path / "run").glob("*.json")
        true = path.read_text()
        entry = json.loads(true)
        path.write_text(json.dumps({**entry, "started_ticks": entry["started_ticks"] + 1}))
        assert registry.stop("demo:bf16") == []
        assert registry.stop("other:bf16") == []
        assert process.poll() is None
        path.write_text(true)
        assert registry.stop("demo:bf16") == [process.pid]
        assert process.wait() == -signal.SIGTERM
    assert registry.engines() == []


def test_a_process_that_does_not_end_is_named(tmp_path: Path) -> None:
    deaf = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)" + ENGINE
    command = [sys.executable, "-c", deaf, str(tmp_path / "run")]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        with pytest.raises(NotStopped, match=str(process.pid)):
            Registry(tmp_path / "run").stop("demo:bf16", patience_s=0.2)
        process.kill()


def test_figures_follow_the_engine(tmp_path: Path) -> None:
    registry = Registry(tmp_path / "run")
    entry = registry.register("demo:bf16", lambda claimed: 0)
    assert entry is not None
    assert registry.engines()[0].figures is None
    held = [Figures(0, 1, 192, 0, 49152, 192 * 49152, None, "ab", 512)]
    entry.publish(lambda: held[-1])
    assert registry.engines()[0].figures == held[0]
    held.append(Figures(0, 2, 192, 0, 2 * 49152, 192 * 49152, 0.5, "ab", 512))
    deadline = time.monotonic() + 10
    while registry.engines()[0].figures == held[0] and time.monotonic() < deadline:
        time.sleep(0.05)
    assert registry.engines()[0].figures == held[1]
    entry.close()
    assert [p.name for p in (tmp_path / "run").iterdir()] == [".lock"]
