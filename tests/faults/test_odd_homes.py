"""FIFOs, devices and folders instead of a home's files: every command ends with a message."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from moeinf.cli.main import answer

LIMIT_S = 20
MODEL = "models/demo/bf16"
FILES = [
    f"{MODEL}/manifest.json",
    f"{MODEL}/config.json",
    f"{MODEL}/generation_config.json",
    f"{MODEL}/tokenizer.json",
    f"{MODEL}/tokenizer_config.json",
    f"{MODEL}/chat_template.jinja",
    f"{MODEL}/dense.safetensors",
    f"{MODEL}/experts/L000/E000.safetensors",
    "models/demo/.f32.partial/journal.jsonl",
    "state/devices.json",
    "state/.devices.json.partial",
    "state/demo/bf16/eamc.log",
    "state/demo/bf16/speeds.json",
    "state/demo/bf16/last_used",
    "run/.lock",
    "run/17-00000000.json",
    "run/17-00000000.server",
    "run/17-00000000.figures",
    "run/pull-demo-bf16.lock",
    "logs/moeinf.log",
    "conversations/kept.json",
    "history",
]
COMMANDS = [["list"], ["show", "demo"], ["ps"], ["stop", "demo"], ["prune"], ["pull", "demo"]]
SLOWER = [  # these load the model, or read it completely
    ["run", "demo", "17+25=", "--memory", "30%"],
    ["verify", "demo"],
    ["eamc", "show", "demo"],
]
KINDS: dict[str, Callable[[Path], object]] = {
    "fifo": lambda path: os.mkfifo(path),  # Windows lacks it
    "device": lambda path: path.symlink_to("/dev/zero"),
    "folder": Path.mkdir,
}


@pytest.fixture
def home(demo_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Return a home with the demo; a call that blocks is interrupted."""
    shutil.copytree(demo_home / MODEL, tmp_path / MODEL, copy_function=os.link)
    monkeypatch.setenv("MOEINF_HOME", str(tmp_path))
    monkeypatch.setenv("MOEINF_HOST", "127.0.0.1:1")

    def hangs(_number: int, _frame: object) -> None:
        pytest.fail(f"it hangs for {LIMIT_S} s")

    before = signal.signal(signal.SIGALRM, hangs)
    yield tmp_path
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.matrix
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("file", FILES)
def test_no_command_hangs_or_has_a_bug(
    file: str, kind: str, home: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = home / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    KINDS[kind](path)
    plan = [["plan", "demo"]] if "devices.json" in file else []  # it measures RAM for a second
    for command in COMMANDS + (SLOWER + plan if kind == "fifo" else []):
        signal.alarm(LIMIT_S)
        code = answer(command)
        said = capfd.readouterr()
        words = f"{command}: {said.out} {said.err}"
        assert code in (0, 1), words
        assert "bug in moeinf" not in said.err, words
