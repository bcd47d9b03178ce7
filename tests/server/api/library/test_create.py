"""Test `/api/create` and `/api/blobs` with Ollama's client and a real server."""

from __future__ import annotations

import hashlib
import os
import stat
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import ollama
import openai
import pytest

from moeinf.runtime.config import Settings
from moeinf.runtime.jobs.export_gguf import export_gguf
from moeinf.runtime.library import blobs as uploads
from moeinf.runtime.library.library import DEMO_CHECKPOINT, Library
from moeinf.server.api.library import blobs_api
from tests.conftest import pull
from tests.server.conftest import serving
from tests.server.test_http import connected

DIGEST = "sha256:" + "0" * 64


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("home")
    pull(DEMO_CHECKPOINT, Settings(home), "demo:bf16")
    return home


@pytest.fixture(scope="module")
def address(home: Path) -> Iterator[str]:
    with serving(home) as found:
        yield found


@pytest.fixture
def client(address: str) -> Iterator[ollama.Client]:
    client = ollama.Client(address)
    yield client
    client._client.close()


def statuses(client: ollama.Client, model: str, **about: object) -> list[str | None]:
    return [one.status for one in client.create(model=model, stream=True, **about)]  # type: ignore[call-overload]


def test_a_created_name_answers_with_its_defaults(address: str, client: ollama.Client) -> None:
    first, *_, writing, last = statuses(
        client,
        "adder",
        from_="demo",
        system="sort fig, ant",
        parameters={"num_predict": 2, "temperature": 0, "stop": ["zz"], "num_thread": 4},
        messages=[{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2"}],
        license=["MIT"],
    )
    assert first == "num_thread has no effect here, and is left out"
    assert (writing, last) == ("writing manifest", "success")
    shown = client.show("adder")
    assert shown.parameters is not None
    assert [line.split(None, 1) for line in shown.parameters.split("\n")] == [
        ["num_predict", "2"], ["stop", "zz"], ["temperature", "0.0"],
    ]  # fmt: skip
    assert shown.license == "MIT"
    raw = httpx.post(f"{address}/api/show", json={"model": "adder"}).json()
    assert raw["system"] == "sort fig, ant"
    assert raw["messages"][1] == {"role": "assistant", "content": "2"}
    assert raw["details"]["parent_model"] == "demo:bf16"
    assert "MESSAGE user 1+1=\nMESSAGE assistant 2\n" in raw["modelfile"]

    ours = [{"role": "user", "content": "17+25="}]
    theirs = [
        {"role": "system", "content": "sort fig, ant"},
        {"role": "user", "content": "1+1="},
        {"role": "assistant", "content": "2"},
        *ours,
    ]
    plain = client.chat(
        "demo", theirs, options={"temperature": 0, "num_predict": 2, "stop": ["zz"]}
    )
    made = client.chat("adder", ours)
    assert made.message.content == plain.message.content
    assert made.prompt_eval_count == plain.prompt_eval_count
    assert client.generate("adder", "17+25=").prompt_eval_count == plain.prompt_eval_count
    raw_prompt = client.generate("adder", "17+25=", raw=True)
    assert raw_prompt.prompt_eval_count is not None
    assert plain.prompt_eval_count is not None
    assert raw_prompt.prompt_eval_count < plain.prompt_eval_count
    with openai.OpenAI(base_url=f"{address}/v1", api_key="any", max_retries=0) as other:
        chat = other.chat.completions.create(model="adder", messages=ours)  # type: ignore[arg-type]
        assert chat.choices[0].message.content == plain.message.content
        free = other.chat.completions.create(model="adder", messages=ours, max_tokens=-1)  # type: ignore[arg-type]
        assert free.usage is not None
        assert free.usage.completion_tokens > 2
    other_system = client.chat("adder", [{"role": "system", "content": "x"}, *ours])
    assert other_system.prompt_eval_count is not None
    assert other_system.prompt_eval_count < plain.prompt_eval_count
    assert client.chat("adder", ours, options={"num_predict": 1}).eval_count == 1


def test_num_ctx_and_a_template_of_its_own(address: str, client: ollama.Client) -> None:
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    assert statuses(client, "short", from_="demo", template=template, parameters={"num_ctx": 64})
    answer = client.chat("short", [{"role": "user", "content": "17+25="}])
    plain = client.generate("demo", "17+25=", raw=True)
    assert answer.prompt_eval_count == plain.prompt_eval_count
    assert client.show("short").template == template
    (living,) = [one for one in client.ps().models if one.model == "short:bf16"]
    assert living.context_length == 64
    assert statuses(client, "short", from_="short", template=template)[-1] == "success"
    assert client.show("short").parameters == "num_ctx                        64"


@pytest.mark.parametrize(
    ("about", "code", "words"),
    [
        ({"modelfile": "FROM demo"}, "bad_request", "modelfile is not supported"),
        ({"from": "demo", "quantize": "q4_K_M"}, "bad_request", "quantize is not supported"),
        ({"from": "demo", "adapters": {"a": DIGEST}}, "bad_request", "adapters is not supported"),
        ({"from": "demo", "template": "{{ .Prompt }}"}, "invalid", "Go template"),
        ({"from": "demo", "template": "{{ nothing }}"}, "invalid", "leaves out the user's message"),
        ({"from": "demo", "template": "{% if %}"}, "bad_template", "cannot be rendered"),
        ({"from": "demo", "parameters": {"spice": 1}}, "invalid", "'spice' is not supported"),
        ({"from": "demo", "parameters": {"top_p": 7}}, "invalid", "top_p must be"),
        ({"from": "demo", "parameters": {"num_ctx": 1 << 30}}, "invalid", "num_ctx: 1073741824"),
        ({"from": "../x"}, "bad_request", "needs `moeinf create`"),
        ({"from": "dmo"}, "model_not_found", "no model 'dmo'"),
        ({}, "bad_request", "one of from"),
        ({"files": {"../m.gguf": DIGEST}}, "invalid", "expected the name of a .gguf file"),
        ({"files": {"m.gguf": DIGEST}}, "blob_not_found", "has not been uploaded"),
        ({"files": {"m.gguf": "sha256:x"}}, "invalid", "64 hexadecimal digits"),
    ],
)  # fmt: skip
def test_what_is_refused(address: str, about: dict[str, object], code: str, words: str) -> None:
    answer = httpx.post(f"{address}/api/create", json={"model": "no", "stream": False, **about})
    assert answer.status_code in (400, 404)
    assert answer.json()["code"] == code
    assert words in answer.json()["error"]
    assert httpx.post(f"{address}/api/show", json={"model": "no"}).status_code == 404


def test_a_pulled_model_is_not_replaced(address: str, home: Path) -> None:
    about = {"model": "demo:bf16", "from": "demo", "system": "x", "stream": False}
    assert httpx.post(f"{address}/api/create", json=about).json()["code"] == "model_exists"
    assert Library(Settings(home)).read("demo")[0].defaults is None


def test_a_gguf_is_uploaded_and_imported(home: Path, client: ollama.Client, tmp_path: Path) -> None:
    manifest, folder = Library(Settings(home)).read("demo")
    file = tmp_path / "tiny.gguf"
    export_gguf(folder, manifest, file, lambda *_: None, lambda _: None, False)
    digest = client.create_blob(file)
    assert digest == "sha256:" + hashlib.sha256(file.read_bytes()).hexdigest()
    stored = home / "blobs" / digest.replace(":", "-")
    assert stat.S_IMODE(stored.stat().st_mode) == 0o600
    assert stored.read_bytes() == file.read_bytes()
    assert client.create_blob(file) == digest  # again: 200, and nothing is written
    found = statuses(client, "mine:bf16", files={"tiny.gguf": digest}, system="hello")
    assert found[-1] == "success"
    assert list((home / "blobs").iterdir()) == []
    ours = [{"role": "system", "content": "hello"}, {"role": "user", "content": "17+25="}]
    exact = {"temperature": 0, "num_predict": 8}
    plain = client.chat("demo", ours, options=exact)
    made = client.chat("mine", ours[1:], options=exact)
    assert made.message.content == plain.message.content
    shown = client.show("mine")
    assert shown.modelfile is not None
    assert "\nFROM mine:bf16\n" in shown.modelfile


def refused(address: str, size_bytes: int) -> bytes:
    """Return the answer to an upload that would have this size."""
    head = f"POST /api/blobs/{DIGEST} HTTP/1.1\r\nHost: localhost\r\n"
    with connected(address) as sock:
        sock.sendall(f"{head}Content-Length: {size_bytes}\r\n\r\n".encode())
        found = b""
        while b'"code"' not in found:
            found += sock.recv(4096)
        return found


def test_uploads_are_checked(address: str, home: Path) -> None:
    wrong = httpx.post(f"{address}/api/blobs/{DIGEST}", content=b"other")
    assert (wrong.status_code, wrong.json()["code"]) == (400, "wrong_digest")
    assert httpx.head(f"{address}/api/blobs/{DIGEST}").status_code == 404
    assert httpx.post(f"{address}/api/blobs/sha256:..%2Fx", content=b"x").status_code in (400, 404)
    assert httpx.post(f"{address}/api/blobs/md5:0", content=b"x").json()["code"] == "invalid"
    most = uploads.MOST_BLOB_BYTES
    assert b"body_too_long" in refused(address, most + 1)
    assert b"disk_full" in refused(address, most)
    long = b"x" * (9 << 20)  # longer than other bodies may be
    digest = "sha256:" + hashlib.sha256(long).hexdigest()
    assert httpx.post(f"{address}/api/blobs/{digest}", content=long).status_code == 201
    assert httpx.head(f"{address}/api/blobs/{digest}").status_code == 200
    assert [path.name for path in (home / "blobs").iterdir()] == [digest.replace(":", "-")]
    store = uploads.Blobs(home / "blobs")
    store.remove_expired()
    assert store.has(digest)
    late = time.time() - uploads.KEPT_SECONDS - 1
    os.utime(home / "blobs" / digest.replace(":", "-"), (late, late))
    store.remove_expired()
    assert not store.has(digest)


def test_uploads_at_a_time_are_few(
    address: str, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each counts before its file is open, which takes time on a thread."""
    begun, may, expect = threading.Event(), threading.Event(), uploads.Blobs.expect

    def slowly(self: uploads.Blobs, digest: str, size_bytes: int) -> uploads.Upload:
        begun.set()
        assert may.wait(30)
        return expect(self, digest, size_bytes)

    monkeypatch.setattr(uploads.Blobs, "expect", slowly)
    monkeypatch.setattr(blobs_api, "MOST_UPLOADS", 1)
    url = f"{address}/api/blobs/{DIGEST}"
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(httpx.post, url, content=b"x", timeout=60)
        assert begun.wait(30)
        second = httpx.post(url, content=b"x").json()["code"]
        may.set()
    assert (first.result().json()["code"], second) == ("wrong_digest", "bodies_too_long")
    assert httpx.post(url, content=b"x").json()["code"] == "wrong_digest"  # its place is free
