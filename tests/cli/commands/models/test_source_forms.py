"""Test that every promised form of a source is pulled: by the command, and over the socket.

Each runs in a process of its own, because the library alone once read what no command could.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
from gguf import GGMLQuantizationType as Kind

from moeinf.runtime.library.library import DEMO_CHECKPOINT
from scripts.make_checkpoint import byte_tokenizer
from tests.cli.commands.models.test_pull_hub import cut_demo
from tests.cli.commands.test_encoder_decoders import bin_repository
from tests.cli.conftest import COMMAND, environment
from tests.gguf_files import matrices, write_gguf
from tests.hub_server import Hub, serve
from tests.runtime.checkpoints.quantised.test_fp8 import save_fp8
from tests.runtime.checkpoints.quantised.test_nvfp4 import save as save_nvfp4
from tests.server.test_first_requests import served
from tests.tiny_mxfp4 import save_mxfp4
from tests.tiny_packed import compressed, integers, save_packed, scheme

REPO = "Org/Tiny"


def one_file(folder: Path) -> Path:
    return Path(shutil.copytree(DEMO_CHECKPOINT, folder))


def sharded(folder: Path) -> Path:
    cut_demo(folder, 3)
    return folder


def one_bin(folder: Path) -> Path:
    return bin_repository(DEMO_CHECKPOINT, folder, 1)


def sharded_bin(folder: Path) -> Path:
    return bin_repository(DEMO_CHECKPOINT, folder, 3)


def gguf_file(folder: Path) -> Path:
    folder.mkdir()
    return write_gguf(DEMO_CHECKPOINT, folder / "tiny-Q8_0.gguf", matrices(Kind.Q8_0))


def split_gguf(folder: Path) -> Path:
    folder.mkdir()
    return write_gguf(DEMO_CHECKPOINT, folder / "tiny-Q8_0.gguf", matrices(Kind.Q8_0), split=30)


def nvfp4(folder: Path) -> Path:
    save_nvfp4(folder)
    return folder


def packed(folder: Path) -> Path:
    save_packed(folder, compressed(scheme()), lambda n: integers() if ".experts." in n else None)
    return folder


def fp8(folder: Path) -> Path:
    folder.mkdir()
    save_fp8(folder)
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    return folder


def mxfp4(folder: Path) -> Path:
    save_mxfp4(folder)
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    return folder


Maker = Callable[[Path], Path]
OTHERS = (one_file, sharded, sharded_bin, gguf_file, split_gguf, nvfp4, packed, fp8, mxfp4)
MAKERS = [one_bin, *(pytest.param(one, marks=pytest.mark.full) for one in OTHERS)]
DEMOS = (one_file, sharded, one_bin, sharded_bin, gguf_file, split_gguf)


def moeinf(home: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *arguments],
        env={**environment(home), "MOEINF_NO_SERVER": "1", **variables},
        capture_output=True, text=True, check=False,
    )  # fmt: skip


@pytest.mark.parametrize("make", MAKERS)
def test_the_command_pulls(make: Maker, tmp_path: Path) -> None:
    source, home = make(tmp_path / "source"), tmp_path / "home"
    pulled = moeinf(home, "pull", str(source), "--name", "tiny:q8", "--no-base")
    assert pulled.returncode == 0, pulled.stderr
    if make in DEMOS:
        asked = moeinf(home, "run", "tiny:q8", "17+25=")
        assert (asked.returncode, asked.stdout) == (0, "42\n"), asked.stderr


@pytest.mark.parametrize("make", MAKERS)
def test_the_server_pulls(make: Maker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, home = make(tmp_path / "source"), tmp_path / "home"
    repository, suffix, folder = REPO, "q8", source
    if source.suffix == ".gguf":
        repository, suffix, folder = f"{REPO}-GGUF", "Q8_0", source.parent
    with serve(Hub(repository, folder)) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.endpoint)
        monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
        with served(home) as address:
            asked = {"model": f"hf.co/{repository}:{suffix}", "stream": False}
            pulled = httpx.post(f"{address}/api/pull", json=asked, timeout=120)
            assert pulled.status_code == 200, pulled.text
            assert pulled.json()["status"] == "success"
            [model] = httpx.get(f"{address}/api/tags").json()["models"]
            if make in DEMOS:
                body = {"model": model["name"], "prompt": "17+25=", "stream": False}
                answer = httpx.post(f"{address}/api/generate", json=body, timeout=120)
                assert answer.json()["response"] == "42"


@pytest.mark.parametrize("where", ["folder", pytest.param("hub", marks=pytest.mark.full)])
def test_a_bin_checkpoint_is_planned(where: str, tmp_path: Path) -> None:
    source = one_bin(tmp_path / "source")
    with serve(Hub(REPO, source)) as hub:
        variables = {"HF_ENDPOINT": hub.endpoint, "HF_HOME": str(tmp_path / "hf")}
        name = str(source) if where == "folder" else REPO
        planned = moeinf(tmp_path / "home", "plan", name, "--json", **variables)
    assert planned.returncode == 0, planned.stderr
    assert json.loads(planned.stdout)


BROKEN = """
import sys
import torch

def load(*_, **__):
    raise ImportError("cannot import name 'ContentStoreReader'")

torch.load = load
from moeinf.cli.entry import main
main()
"""


def test_an_import_that_fails_is_not_the_files_fault(tmp_path: Path) -> None:
    source = one_bin(tmp_path / "source")
    done = subprocess.run(
        [sys.executable, "-c", BROKEN, "pull", str(source), "--name", "tiny:q8", "--json"],
        env={**os.environ, **environment(tmp_path / "home")},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert "bad_checkpoint" not in done.stdout + done.stderr
    assert "ContentStoreReader" in done.stdout + done.stderr
