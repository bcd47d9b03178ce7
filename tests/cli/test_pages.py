"""Run the code blocks of models.md, gguf.md and coding-agents.md, with the demo for each model.

tests/cli/test_readme.py runs those of the README, of cli.md and of two guides. Commands for other
machines are read only: tests/house/test_documented_commands.py.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from moeinf.runtime.library.library import DEMO_CHECKPOINT
from moeinf.runtime.library.modelfile import parse_modelfile
from tests.cli import warm
from tests.cli.conftest import Command, environment
from tests.hub_server import Hub, serve

ROOT = Path(__file__).parents[2]


def blocks(page: str, kind: str = "sh") -> list[str]:
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    return re.findall(rf"^```{kind}\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


def lines(block: str) -> list[str]:
    """Return the commands of ours in a block, without their comments."""
    found = (line.partition(" #")[0].strip() for line in block.splitlines())
    return [line for line in found if line.startswith("moeinf ")]


def run(line: str, folder: Path, **variables: str) -> str:
    own = {**environment(folder / "home"), **variables}
    done = warm.run(shlex.split(line)[1:], own, folder=folder, merged=True)
    assert done.returncode == 0, f"{line}: {done.stdout}"
    return str(done.stdout)


def divergence(said: str) -> float:
    """Return the KL divergence that `moeinf eval` has printed."""
    (found,) = re.findall(r"^KL divergence +(\S+) nats per token", said, re.MULTILINE)
    return float(found)


@pytest.fixture
def gguf(tmp_path: Path) -> Path:
    """Run the export of docs/models.md, and return its file."""
    run("moeinf pull demo", tmp_path)
    for line in lines(blocks("models.md")[-1]):
        run(line, tmp_path)
    return tmp_path / "demo.gguf"


@pytest.mark.full
def test_gguf_files(gguf: Path) -> None:
    folder = gguf.parent
    first, second = blocks("gguf.md")
    published = folder / "published"
    published.mkdir()
    for name in ("published/Demo-Q4_K_M.gguf", "published/Demo-Q8_0.gguf", "model-F16.gguf"):
        shutil.copyfile(gguf, folder / name)
    gguf.rename(folder / "Qwen3-30B-A3B-Q4_K_M.gguf")
    (folder / "text.txt").write_text("The quick brown fox. 17+25=42")
    with serve(Hub("ORG/REPO-GGUF", published)) as hub:
        for line in lines(first):
            run(line, folder, HF_ENDPOINT=hub.endpoint, HF_HOME=str(folder / "hf"))
    with serve(Hub("ORG/MODEL", DEMO_CHECKPOINT)) as hub:
        for line in lines(second):
            said = run(line, folder, HF_ENDPOINT=hub.endpoint, HF_HOME=str(folder / "hf"))
    assert divergence(said) == 0
    models = json.loads(run("moeinf list --json", folder))["models"]
    assert {model["name"] for model in models} == {
        "demo", "qwen3-30b-a3b-q4_k_m", "org--repo-gguf", "org--repo-gguf-q8_0", "theirs", "ours",
    }  # fmt: skip


@pytest.mark.full
def test_the_loss_of_a_format(tmp_path: Path) -> None:
    """The page's script takes each fourth exercise; here it takes each 200th."""
    block = blocks("models.md")[0]
    script, command, rest = block.partition("moeinf ")
    assert script.count("[::4]") == 1
    (tmp_path / "models").symlink_to(ROOT / "models")
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    shell = ["sh", "-euc", script.replace("[::4]", "[::200]")]
    subprocess.run(shell, cwd=tmp_path, env={**os.environ, "PATH": path}, check=True)
    assert (tmp_path / "text.txt").read_text().startswith("<|begin|><|user|>")
    for line in lines(command + rest):
        said = run(line, tmp_path)
    assert 0 < divergence(said) < 0.1


def test_the_modelfile() -> None:
    (text,) = [block for block in blocks("models.md", "text") if block.startswith("FROM ")]
    found = parse_modelfile(text, "Modelfile")
    assert (found.base, found.without_effect) == ("qwen3-coder-30b-a3b", [])
    assert found.system == "You are a reviewer.\nAnswer in one sentence."
    assert found.parameters == {"temperature": 0.2, "num_ctx": 16384, "stop": ["User:"]}
    assert [message.role for message in found.messages] == ["user", "assistant"]


def test_coding_agents(moeinf: Command) -> None:
    """They are printed, not started, for the demo."""
    launches = [shlex.split(line) for line in lines(blocks("coding-agents.md", "text")[0])]
    launches = [words for words in launches if words[1] == "launch"]
    assert [words[2] for words in launches] == ["claude", "codex", "opencode"]
    for words in launches:
        done = moeinf("launch", "--print", words[2], "demo", *words[4:])
        assert (done.code, "demo:bf16" in done.out) == (0, True), done.err
