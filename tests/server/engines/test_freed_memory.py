"""Unload models in every way: their memory is free at once, without the cyclic collector."""

from __future__ import annotations

import time
from pathlib import Path

import httpx
import pytest

from moeinf.runtime.config import Settings
from moeinf.runtime.placement import plan
from scripts.make_checkpoint import config, make_checkpoint
from tests.conftest import pull
from tests.server_process import ServerProcess, server_process

MODEL, OTHER, MIB = "large:bf16", "other:bf16", 1 << 20
pytestmark = pytest.mark.linux("reads /proc")


def install(home: Path, hidden: int, intermediate: int, *names: str) -> int:
    """Pull a model of 64 experts under some names; return the bytes of its weights."""
    about = config(2, 32, hidden, intermediate, 4)
    size = make_checkpoint(home / "checkpoint", about)
    for name in names:
        pull(home / "checkpoint", Settings(home), name)
    return size


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("home")
    assert install(folder, 256, 512, MODEL, OTHER) > 48 * MIB
    return folder


def held(server: ServerProcess) -> tuple[int, int]:
    assert server.loaded() == []
    return server.descriptors, server.rss_bytes


@pytest.mark.full
def test_ten_loads_and_unloads_are_flat(home: Path) -> None:
    with server_process(home) as server:
        for turn in range(10):
            server.ask(MODEL)
            assert server.descriptors > 64  # its experts' files are open
            server.unload(MODEL)
            if turn == 1:
                files, size = held(server)
        assert held(server)[0] <= files + 4  # a connection closes late
        assert held(server)[1] < size + 16 * MIB


def test_every_way_to_unload_frees_at_once(home: Path) -> None:
    """Turns of two models, a larger context, keep_alive, an edited Modelfile, a failed load."""
    with server_process(home, MOEINF_KEEP_ALIVE="1s") as server:
        server.ask(MODEL)
        server.unload(MODEL)
        files, size = held(server)
        contexts = []
        for turn in range(3):
            server.ask(MODEL, options={"num_ctx": 256 + 64 * turn})  # is loaded again
            contexts += [one["context_length"] for one in server.loaded() if one["name"] == MODEL]
            about = {"model": "edited", "from": MODEL, "system": str(turn), "stream": False}
            server.post("/api/create", **about)
            server.ask("edited")
        assert contexts == [256, 320, 384]
        (folder,) = (home / "models").glob("other/*")
        config_file = folder / "config.json"
        text = config_file.read_text()
        config_file.write_text(text.replace("olmoe", "other"))
        answer = httpx.post(
            f"{server.address}/api/generate", json={"model": OTHER, "prompt": "x"}, timeout=60
        )
        config_file.write_text(text)
        assert answer.status_code >= 400
        until = time.monotonic() + 30
        while server.loaded() and time.monotonic() < until:
            time.sleep(0.1)
        time.sleep(0.5)
        assert held(server)[0] <= files + 4
        assert held(server)[1] < size + 16 * MIB


@pytest.mark.full
def test_large_models_in_little_memory(tmp_path: Path) -> None:
    """Loads and unloads, and turns of two models, of which only one fits as a whole."""
    assert install(tmp_path, 768, 1024, MODEL, OTHER) > 290 * MIB
    headroom = plan.HEADROOM_BYTES
    with server_process(tmp_path, memory_bytes=headroom + 900 * MIB) as server:
        contexts = set()
        for turn in range(12):
            name = (MODEL, OTHER)[turn % 2 if turn > 5 else 0]
            server.ask(name)
            contexts |= {one["context_length"] for one in server.loaded()}
            if turn < 6:
                server.unload(name)
        assert len(contexts) == 1
        assert server.rss_bytes < 900 * MIB
