"""Test pull, copy and delete of models over HTTP."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from http.client import HTTPConnection
from pathlib import Path

import httpx
import ollama
import pytest

from moeinf.runtime.config import Settings
from moeinf.runtime.library.library import DEMO_CHECKPOINT, Library
from moeinf.runtime.names import parse_name
from tests.hub_server import Answer, Hub, Request, serve
from tests.server.conftest import serving


@pytest.fixture
def empty(tmp_path: Path) -> Iterator[tuple[str, Library]]:
    """Start a server on a home without models; yield its address and library."""
    with serving(tmp_path) as address:
        yield address, Library(Settings(tmp_path))


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hub]:
    with serve(Hub("Org/Demo-MoE", DEMO_CHECKPOINT)) as found:
        files = found.endpoint + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", found.endpoint)
        monkeypatch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", files)
        monkeypatch.setattr(
            "huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path_factory.mktemp("hf"))
        )
        yield found


def test_a_model_comes_answers_and_goes(empty: tuple[str, Library]) -> None:
    address, library = empty
    client = ollama.Client(address)
    lines = list(client.pull("demo", stream=True))
    assert lines[0].status == "pulling manifest"
    assert lines[-1].status == "success"
    steps = [line for line in lines if line.status == "repacking"]
    assert [step.completed for step in steps] == sorted({step.completed for step in steps})
    assert steps[-1].completed == steps[-1].total
    assert steps[0].digest
    assert client.pull("demo").status == "success"  # up to date
    options = {"temperature": 0}
    assert client.generate("demo", "17+25=", options=options).response == "42"
    again = [line.status for line in client.pull("demo", stream=True)]  # while it is loaded
    assert again == ["pulling manifest", "demo:bf16 is up to date", "success"]
    client.copy("demo", "second")
    assert {m.model for m in client.list().models} == {"demo:bf16", "second:bf16"}
    client.delete("demo")  # the model is loaded: it is unloaded first
    assert not library.has(parse_name("demo"))
    assert client.generate("second:bf16", "17+25=", options=options).response == "42"
    with pytest.raises(ollama.ResponseError) as caught:
        client.delete("demo")
    assert caught.value.status_code == 404
    client._client.close()


def test_from_the_hub(empty: tuple[str, Library], hub: Hub) -> None:
    address, library = empty
    body = {"model": "Org/Demo-MoE:bf16"}
    answer = httpx.post(f"{address}/api/pull", json=body, timeout=60)
    lines = [json.loads(line) for line in answer.text.splitlines()]
    fetched = [line for line in lines if line["status"] == "pulling model.safetensors"]
    size = (DEMO_CHECKPOINT / "model.safetensors").stat().st_size
    assert (fetched[-1]["completed"], fetched[-1]["total"]) == (size, size)
    assert lines[-1] == {"status": "success"}
    assert library.has(parse_name("org/demo-moe:bf16"))


def test_a_failure_ends_the_lines(empty: tuple[str, Library], hub: Hub) -> None:
    address, library = empty
    hub.fault = lambda _: Answer(status=403)
    body = {"model": "Org/Demo-MoE:bf16"}
    refused = httpx.post(f"{address}/api/pull", json={**body, "stream": False}, timeout=60)
    assert refused.status_code == 503
    first = 0

    def later(request: Request) -> Answer | None:
        nonlocal first
        first += request.file == "model.safetensors" and request.stop - request.start > 4096
        return Answer(status=403) if first else None

    hub.fault = later
    answer = httpx.post(f"{address}/api/pull", json=body, timeout=60)
    last = json.loads(answer.text.splitlines()[-1])
    assert list(last) == ["error", "code"]
    assert not library.has(parse_name("org/demo-moe:bf16"))


class Panic(BaseException):
    """A BaseException that `except Exception` does not catch, like pyo3's PanicException."""


@pytest.mark.parametrize("error", [Panic("at the disco"), SystemExit(3), KeyError("x")])
def test_whatever_a_pull_raises_is_told(
    error: BaseException, empty: tuple[str, Library], monkeypatch: pytest.MonkeyPatch
) -> None:
    address, _ = empty

    def raise_it(*_: object) -> None:
        raise error

    monkeypatch.setattr("moeinf.server.api.library.pull_api.repack", raise_it)
    body = {"model": "demo"}
    whole = httpx.post(f"{address}/api/pull", json={**body, "stream": False}, timeout=60)
    assert whole.status_code == 500
    assert type(error).__name__ in whole.json()["error"]
    lines = httpx.post(f"{address}/api/pull", json=body, timeout=60).text.splitlines()
    assert json.loads(lines[0]) == {"status": "pulling manifest"}
    last = json.loads(lines[-1])
    assert (set(last), last["code"]) == ({"error", "code"}, "internal")
    assert type(error).__name__ in json.loads(lines[-1])["error"]
    assert httpx.get(f"{address}/health").status_code == 200


def test_a_pull_that_fails_late_is_an_error_when_told_whole(
    empty: tuple[str, Library], hub: Hub
) -> None:
    address, library = empty
    body = {"model": "Org/Demo-MoE:bf16"}
    hub.fault = lambda r: (
        Answer(status=403) if r.file == "model.safetensors" and r.stop > 1 << 20 else None
    )
    whole = httpx.post(f"{address}/api/pull", json={**body, "stream": False}, timeout=60)
    assert whole.status_code == 503
    assert whole.json()["code"] == "download_failed"
    assert "model.safetensors" in whole.json()["error"]
    lines = httpx.post(f"{address}/api/pull", json=body, timeout=60).text.splitlines()
    assert json.loads(lines[0]) == {"status": "pulling manifest"}
    last = json.loads(lines[-1])
    assert (set(last), last["code"]) == ({"error", "code"}, "download_failed")
    assert not library.has(parse_name("org/demo-moe:bf16"))


def pulling() -> bool:
    return any(thread.name.startswith("pull ") for thread in threading.enumerate())


@pytest.mark.parametrize("file", ["config.json", "model.safetensors"])
@pytest.mark.parametrize("stream", [True, False])
def test_a_pull_that_waits_ends_with_its_client(
    stream: bool, file: str, empty: tuple[str, Library], hub: Hub
) -> None:
    """The hub asks for a delay of one minute, again and again."""
    address, library = empty
    asked = threading.Event()

    def busy(request: Request) -> Answer | None:
        if request.file != file or (file != "config.json" and request.stop < 1 << 20):
            return None
        asked.set()
        return Answer(status=429, headers={"Retry-After": "60"})

    hub.fault = busy
    body = json.dumps({"model": "Org/Demo-MoE:bf16", "stream": stream})
    with closing(HTTPConnection(address.removeprefix("http://"))) as client:
        client.request("POST", "/api/pull", body, {"Content-Type": "application/json"})
        assert asked.wait(30)
    begin = time.monotonic()
    while pulling() and time.monotonic() - begin < 15:
        time.sleep(0.05)
    assert not pulling()
    assert not library.has(parse_name("org/demo-moe:bf16"))


def test_a_pull_ends_with_its_client(empty: tuple[str, Library], hub: Hub) -> None:
    address, library = empty
    stall = threading.Event()

    def slowly(request: Request) -> Answer | None:
        large = request.file == "model.safetensors" and request.stop - request.start > 4096
        return Answer(stall=stall) if large else None

    hub.fault = slowly
    body = {"model": "Org/Demo-MoE:bf16"}
    with httpx.stream("POST", f"{address}/api/pull", json=body, timeout=60) as lines:
        assert json.loads(next(lines.iter_lines()))["status"] == "pulling manifest"
    stall.set()
    for _ in range(200):
        names = [thread.name for thread in threading.enumerate()]
        if not any(name.startswith("pull ") for name in names):
            break
        time.sleep(0.05)
    else:
        raise AssertionError(f"still pulling: {names}")
    assert not library.has(parse_name("org/demo-moe:bf16"))
    hub.fault = lambda _: None
    answer = httpx.post(f"{address}/api/pull", json={**body, "stream": False}, timeout=60)
    assert answer.json() == {"status": "success"}


@pytest.mark.parametrize(
    ("model", "status"),
    [
        ("/etc", 400),
        ("./here", 400),
        ("ollama:qwen3", 400),
        ("~/x", 400),
        ("no such", 400),
        ("unheard-of", 404),
        ("", 400),
    ],
)
def test_what_cannot_be_pulled(model: str, status: int, address: str) -> None:
    answer = httpx.post(f"{address}/api/pull", json={"model": model, "stream": False})
    assert answer.status_code == status
    assert answer.json()["error"]
