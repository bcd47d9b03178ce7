"""Test every error of the server over HTTP: its code, its status and its words."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from moeinf.models.base import ContextFull
from moeinf.native import DeviceError
from moeinf.offload.store.budget import DoesNotFit
from moeinf.runtime.library.processes import Registry
from moeinf.server.api import experts_api
from moeinf.server.cluster.failures import ReplicaLost
from moeinf.server.engines.jobs import Busy, Unloaded
from moeinf.server.engines.model_manager import ModelManager
from moeinf.server.http import bodies
from tests.errors.provoking import Place, check_words
from tests.errors.tree import coded
from tests.server.conftest import serving

Asked = Callable[[str], httpx.Response]
CASES: dict[str, Callable[[Place], Asked]] = {}
DIGEST = "sha256:" + "0" * 64
GENERATE = {"model": "demo", "prompt": "a", "stream": False}


def ask(path: str, method: str = "POST", **said: Any) -> Callable[[Place], Asked]:
    return lambda _: lambda address: httpx.request(method, f"{address}{path}", timeout=60, **said)


def generate(**said: object) -> Callable[[Place], Asked]:
    return ask("/api/generate", json={**GENERATE, **said})


CASES |= {
    "bad_name": generate(model="../x"),
    "model_not_found": generate(model="dmo"),
    "model_exists": ask("/api/copy", json={"source": "demo:bf16", "destination": "demo:bf16"}),
    "unknown_source": ask("/api/pull", json={"model": "nothing-like-it"}),
    "hub": ask("/api/pull", json={"model": "Org/Model"}),
    "prompt_too_long": generate(prompt="x" * 600),
    "invalid": generate(keep_alive="soon"),
    "bad_request": generate(options={"temperature": -1}),
    "bad_format": generate(format={"type": "nonsense"}),
    "bad_body": ask("/api/generate", content=b"{not json"),
    "unknown_host": ask("/api/tags", "GET", headers={"Host": "evil.example"}),
    "unknown_origin": ask("/api/tags", "GET", headers={"Origin": "http://evil.example"}),
    "body_too_long": ask("/api/show", content=b" " * (8 << 20) + b"{}"),
    "unknown_path": ask("/nowhere", "GET"),
    "wrong_method": ask("/api/generate", "GET"),
    "blob_not_found": ask(
        "/api/create", json={"model": "x", "files": {"x.gguf": DIGEST}, "stream": False}
    ),
    "wrong_digest": ask(f"/api/blobs/{DIGEST}", content=b"x"),
    "response_not_found": ask("/v1/responses/resp_1", "GET"),
    "not_loaded": ask("/api/experts?model=demo", "GET"),
    "headers_too_long": ask("/api/tags", "GET", headers={"X": "a" * (65 << 10)}),
}


def case(code: str) -> Callable[[Callable[[Place], Asked]], None]:
    def enter(function: Callable[[Place], Asked]) -> None:
        assert code not in CASES
        CASES[code] = function

    return enter


@case("not_recorded")
def _(place: Place) -> Asked:
    return ask("/api/simulate?model=demo", "GET")(place)


@case("cannot_replay")
def _(place: Place) -> Asked:
    path = place.home / "state/demo/bf16/recording.eam"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"damaged")
    return ask("/api/simulate?model=demo", "GET")(place)


@case("model_in_use")
def _(place: Place) -> Asked:
    registration = Registry(place.home / "run").register("demo:bf16", lambda _: 0)
    assert registration is not None
    place.later.callback(registration.close)
    return ask("/api/delete", "DELETE", json={"model": "demo:bf16"})(place)


@case("invalid_api_key")
def _(place: Place) -> Asked:
    place.server["api_key"] = "secret"
    return ask("/api/tags", "GET")(place)


@case("too_many_streams")
def _(place: Place) -> Asked:
    place.patch.setattr(experts_api, "MOST_STREAMS", 0)

    def watch(address: str) -> httpx.Response:
        httpx.post(f"{address}/api/generate", json={"model": "demo"}, timeout=60)
        return httpx.get(f"{address}/api/experts?stream=1", timeout=60)

    return watch


@case("bodies_too_long")
def _(place: Place) -> Asked:
    place.patch.setattr(bodies, "ALL_BODIES_BYTES", 1 << 20)
    return ask("/api/chat", json={"model": "x", "messages": [{"role": "user"}] * 2000})(place)


def sent(head: bytes) -> Callable[[Place], Asked]:
    """Return a function that sends raw bytes and returns the response."""

    def send(address: str) -> httpx.Response:
        where = urlsplit(address)
        with socket.create_connection((where.hostname or "", where.port or 0), timeout=30) as sock:
            sock.sendall(head)
            answer = b"".join(iter(lambda: sock.recv(4096), b""))
        first, _, rest = answer.partition(b"\r\n")
        return httpx.Response(int(first.split()[1]), content=rest.partition(b"\r\n\r\n")[2])

    return lambda _: send


@case("body_late")
def _(place: Place) -> Asked:
    place.patch.setattr(bodies, "BODY_SECONDS", 0.05)
    head = b"POST /api/show HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
    return sent(head + b"Content-Length: 9\r\n\r\n")(place)


CASES["two_lengths"] = sent(
    b"POST /api/show HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
    b"Content-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n"
)
PLANTED = {
    "internal": KeyError("x"),
    "out_of_memory": MemoryError("8 GiB"),
    "out_of_threads": RuntimeError("can't start new thread"),
    "disk_full": OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "x.partial"),
    "io_error": OSError(errno.EIO, os.strerror(errno.EIO), "dense.safetensors"),
    "busy": Busy("16 requests are waiting: try again"),
    "unloaded": Unloaded("the model was unloaded"),
    "replica_lost": ReplicaLost("the replica that answered has ended"),
    "context_full": ContextFull("the context of 512 tokens is full"),
    "does_not_fit": DoesNotFit(1 << 20, 3 << 20),
    "device_failed": DeviceError("cuStreamSynchronize: CUDA_ERROR_ILLEGAL_ADDRESS"),
}


@pytest.mark.parametrize("code", sorted({*CASES, *PLANTED}))
def test_an_error(code: str, place: Place) -> None:
    (kind,) = [kind for kind in coded() if kind.code == code]
    if code in PLANTED:
        place.raising(ModelManager, "model", PLANTED[code])
    asked = CASES.get(code, generate())(place)
    with serving(place.home, **place.server) as address:
        answer = asked(address)
    told = answer.json()
    if isinstance(told["error"], dict):  # under /v1
        told = {**told["error"], "error": told["error"]["message"]}
    assert (answer.status_code, told["code"]) == (kind.http_status, code)
    check_words(f"server: {code}", [place.plain(told["error"])])


@pytest.mark.parametrize(
    ("error", "status", "code", "type"),
    [
        (ContextFull("full"), 400, "context_length_exceeded", "invalid_request_error"),
        (Busy("busy"), 503, "busy", "server_error"),
        (KeyError("x"), 500, "internal", "server_error"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_the_form_that_openai_has(
    error: Exception, status: int, code: str, type: str, place: Place
) -> None:
    place.raising(ModelManager, "model", error)
    with serving(place.home) as address:
        answer = httpx.post(f"{address}/v1/completions", json={"model": "demo", "prompt": "a"})
    assert answer.status_code == status
    told = answer.json()["error"]
    assert (told["code"], told["type"], told["param"]) == (code, type, None)


def test_every_error_is_provoked() -> None:
    """Each is provoked here or on the command line."""
    from tests.errors.store_cases import CASES as COMMANDS

    known = {kind.code for kind in coded()}
    assert known == {*CASES, *PLANTED, *COMMANDS}
