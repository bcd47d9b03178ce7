"""Test that every document of --json matches docs/schemas: no field missing, none unknown."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from moeinf.cli.main import answer, command_line
from moeinf.runtime.library.library import DEMO_CHECKPOINT
from tests.cli.conftest import SCHEMAS, check_document

# They run in this order in one home: later ones use files of earlier ones. FOLDER: a checkpoint.
DOCUMENTS = (
    ("pull-dry-run", "pull demo --dry-run"),
    ("pull-list-local", "pull --list-local"),
    ("plan", "plan demo:q4 --memory 200KiB"),
    ("pull", "pull FOLDER --name mine:q8"),
    ("pull", "pull demo"),
    ("list", "list"),
    ("search", "search qwen3"),
    ("show", "show demo"),
    ("show-registered", "show olmoe"),
    ("plan", "plan demo --memory 30%"),
    ("plan", "run demo --dry-run"),
    ("run", "run demo 17+25= --memory 30%"),
    ("run", "run demo 17+25= --max-tokens 1"),
    ("run", "run demo 17+25= --memory 30% --skip-below 0.03 --route cache-aware=0.2 --no-server"),
    ("pull", "pull demo:q2"),
    ("run", "run demo 17+25= --memory 30% --experts q2-on-miss --no-server"),
    ("ps", "ps"),
    ("bench", "bench demo --prompt-tokens 8 --new-tokens 4 --rounds 1 --policies lru,adaptive"),
    ("eval", "eval demo --file TEXT"),
    ("eval", "eval demo --file TEXT --against demo --memory 30% --skip-below 0.03"),
    ("eval", "eval demo --file TEXT --memory 30% --route cache-aware=0.2"),
    ("eval", "eval demo --file TEXT --memory 30% --experts q2-on-miss=0.5"),
    ("eval", "eval mine:q8 --file TEXT --against demo:bf16"),
    ("eamc-show", "eamc show mine:q8"),
    ("trace", "trace demo --dataset demo --limit 3 --out TRACE"),
    ("eamc-show", "eamc show demo"),
    ("eamc-export", "eamc export demo EAMC"),
    ("eamc-import", "eamc import demo EAMC"),
    ("simulate", "simulate TRACE --capacity 10%,20%"),
    ("bench", "bench demo --replay TRACE --rounds 1 --memory 30% --hints recorded"),
    ("simulate", "simulate TRACE --policies adaptive --sweep hysteresis=0,0.5 --hints 0.9,0.9"),
    ("simulate", "simulate TRACE --policies lru --device-capacity 5%,10% --miss auto,fetch"),
    (
        "simulate-replicas",
        "simulate REQUESTS --replicas 1,2 --policies lru --capacity 20% --conversations 2",
    ),
    ("eamc-clear", "eamc clear demo"),
    ("verify", "verify demo"),
    ("export", "export demo --gguf GGUF"),
    ("cp", "cp demo other"),
    ("create", "create made --file MODELFILE"),
    ("show", "show made"),
    ("show-modelfile", "show made --modelfile"),
    ("launch", "launch opencode made"),
    ("rm", "rm other:bf16 mine:q8"),
    ("prune", "prune"),
    ("doctor", "doctor"),
    ("error", "show nothing"),
    ("error", "show"),
    ("error", "stop demo"),
)
# In their own tests: a process to stop or to watch; twenty seconds.
ELSEWHERE = {"stop", "set", "top", "devices"}


def test_documents(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MOEINF_HOME", str(tmp_path / "home"))
    (tmp_path / "text").write_text("The quick brown fox. 17+25=42")
    files = {"FOLDER": str(DEMO_CHECKPOINT), "TEXT": str(tmp_path / "text")}
    files |= {name: str(tmp_path / f"{name}.eam") for name in ("TRACE", "EAMC")}
    files["REQUESTS"] = str(Path(__file__).parents[1] / "data/traces/gpt-oss-20b.npz")
    files["MODELFILE"] = str(tmp_path / "Modelfile")
    (tmp_path / "Modelfile").write_text(
        "FROM demo\nSYSTEM x\nPARAMETER seed 1\nMESSAGE user a\nLICENSE MIT\n"
    )
    files["GGUF"] = str(tmp_path / "demo.gguf")
    for name, line in DOCUMENTS:
        code = answer([*(files.get(word, word) for word in line.split()), "--json"])
        document = json.loads(capsys.readouterr().out)
        assert (code == 0) == (name != "error"), line
        check_document(name, document)


def test_every_command_with_json_is_among_them() -> None:
    shown = {line.split()[0] for _, line in DOCUMENTS}
    group: Any = command_line()
    for name, command in group.commands.items():
        if name == "eamc":
            assert {f"eamc-{verb}" for verb in command.commands} <= {n for n, _ in DOCUMENTS}
        elif any(parameter.name == "json" for parameter in command.params):
            assert name in shown | ELSEWHERE or name == "ls", name


def test_every_schema_is_used() -> None:
    files = {path.stem for path in SCHEMAS.glob("*.json")}
    assert files == {name for name, _ in DOCUMENTS} | ELSEWHERE
