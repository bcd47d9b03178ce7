"""Test `moeinf pull` of GGUF files on the hub's stand-in: kills, the cache, offline, repairs."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from gguf import GGMLQuantizationType as Kind

from moeinf.runtime.library.library import DEMO_CHECKPOINT
from tests.cli.commands.models.test_pull_hub import Machine
from tests.gguf_files import matrices, write_gguf
from tests.hub_server import COMMIT, Hub, serve

REPO = "Org/Demo-GGUF"
BASE = "Org/Demo"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Write the demo as Q8_0 in a subfolder, in two parts, and its base with another template."""
    files, base = (tmp_path_factory.mktemp(name) for name in ("files", "base"))
    (files / "Q8_0").mkdir()
    write_gguf(DEMO_CHECKPOINT, files / "Q8_0/demo-Q8_0.gguf", matrices(Kind.Q8_0), split=60)
    shutil.copytree(DEMO_CHECKPOINT, base, dirs_exist_ok=True)
    template = base / "chat_template.jinja"
    template.write_text("{# of the base #}" + template.read_text())
    return files, base


@pytest.fixture
def hub(folders: tuple[Path, Path]) -> Iterator[Hub]:
    hub = Hub(REPO, folders[0])
    hub.beside.append(Hub(BASE, folders[1]))
    hub.card = {"base_model": [BASE]}
    with serve(hub):
        yield hub


@pytest.fixture
def machine(tmp_path: Path, hub: Hub) -> Machine:
    return Machine(tmp_path, hub)


def made(machine: Machine) -> Path:
    return machine.home / "models/org--demo-gguf/q8"


def test_the_base_gives_the_template_and_repairs_it(machine: Machine, hub: Hub) -> None:
    pulled = machine("pull", REPO)
    assert pulled.code == 0, pulled.err
    assert f"those of {BASE}; 15 kinds of its tensors agree with the file" in pulled.err
    template = made(machine) / "chat_template.jinja"
    before = template.read_bytes()
    assert before.startswith(b"{# of the base #}")
    assert (
        json.loads(machine("show", "org/demo-gguf:q8", "--json").out)["base"] == f"{BASE}@{COMMIT}"
    )
    template.unlink()
    next(made(machine).glob("experts/*/*")).write_bytes(b"damaged")
    hub.requests.clear()
    repaired = machine("verify", "org/demo-gguf:q8", "--repair")
    assert repaired.code == 0, repaired.err
    assert template.read_bytes() == before
    ranges = [request for request in hub.requests if request.file.endswith(".gguf")]
    whole = sum(path.stat().st_size for path in hub.folder.rglob("*.gguf"))
    assert sum(request.stop - request.start for request in ranges) < whole // 2
    assert machine("verify", "org/demo-gguf:q8").code == 0
    assert machine("run", "org/demo-gguf:q8", "17+25=").out == "42\n"


def fill_cache(hub: Hub, folder: Path) -> Path:
    """Copy the repository into the Hugging Face cache of the machine in `folder`."""
    cache = folder / "hf/hub/models--Org--Demo-GGUF"
    shutil.copytree(hub.folder, cache / "snapshots" / COMMIT)
    (cache / "refs").mkdir()
    (cache / "refs" / "main").write_text(COMMIT)
    return cache / "snapshots" / COMMIT


def test_files_in_the_cache_are_used_in_place(machine: Machine, hub: Hub, tmp_path: Path) -> None:
    snapshot = fill_cache(hub, tmp_path)
    offline = machine("pull", f"{REPO}:Q8_0", "--name", "x", HF_HUB_OFFLINE="1")
    assert offline.code == 0, offline.err
    assert hub.requests == hub.beside[0].requests == []
    folder = machine.home / "models/x/q8"
    about = json.loads((folder / "manifest.json").read_text())
    assert (about["source"], about["revision"]) == (f"hub:{REPO}:Q8_0", COMMIT)
    assert "base" not in about
    for name in ("tokenizer.json", "experts/L000/E000.safetensors"):
        (folder / name).unlink()
    assert machine("verify", "x:q8", "--repair", HF_HUB_OFFLINE="1").code == 0
    assert hub.requests == []
    other = machine("pull", f"{REPO}:Q4_0", HF_HUB_OFFLINE="1")
    assert (other.code, "it has Q8_0" in other.err) == (1, True)
    online = machine("pull", REPO, "--no-base")
    assert online.code == 0, online.err
    assert all(request.stop - request.start <= 2 << 20 for request in hub.requests)  # headers
    assert hub.beside[0].requests == []
    shutil.rmtree(snapshot)
    gone = machine("pull", REPO, "--name", "y", HF_HUB_OFFLINE="1")
    assert (gone.code, "is not in the Hugging Face cache" in gone.err) == (1, True)


@pytest.mark.parametrize("pause", [0.1, pytest.param(0.5, marks=pytest.mark.full)])
def test_kill_and_rerun(pause: float, machine: Machine, hub: Hub) -> None:
    """The rerun completes a pull that was killed after its first request for weights."""
    process = machine.start("pull", REPO)
    while not any(r.start > 1 << 20 for r in hub.requests):
        time.sleep(0.01)
        assert process.poll() is None
    time.sleep(pause)
    process.kill()
    process.wait()
    assert machine("pull", REPO).code == 0
    assert machine("verify", "org/demo-gguf:q8").code == 0
    assert json.loads(machine("prune", "--list-partials", "--json").out)["partials"] == []
