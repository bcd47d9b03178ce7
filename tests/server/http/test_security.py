"""Test which hosts and origins may ask, by the server's address, and the form of refusals."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from moeinf.runtime.config import ServerSettings
from moeinf.server.http.security import Guard
from tests.server.conftest import serving

# Ollama's clients: Electron, Tauri, the extensions and pages of VS Code, files of an app.
APPS = (
    "app://obsidian.md",
    "tauri://localhost",
    "vscode-webview://0rbl4fe3",
    "vscode-file://vscode-app",
    "file://",
)


def status(settings: ServerSettings, **headers: str) -> int:
    """Return the status of a request through a Guard alone."""
    found = list[int]()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})

    async def send(message: Any) -> None:
        found.extend([message["status"]] if "status" in message else [])

    given = {"host": "localhost", **headers}
    scope = {
        "type": "http", "method": "GET", "path": "/api/tags", "raw_path": b"/api/tags",
        "query_string": b"", "http_version": "1.1",
        "headers": [(name.encode(), value.encode()) for name, value in given.items()],
    }  # fmt: skip
    guard = Guard(app, settings, lambda _, error: {"error": str(error)})
    asyncio.run(guard(scope, None, send))
    (one,) = found
    return one


@pytest.mark.parametrize("host", ["moeinf", "moeinf:11435", "moeinf-server_1", "OLLAMA"])
def test_names_of_containers(host: str) -> None:
    """They reach a server that is bound to more than the loopback, and only such a server."""
    for open_to_others in ("0.0.0.0", "::", "192.168.1.7", "box.lan"):
        assert status(ServerSettings(host=open_to_others), host=host) == 200
    for closed in ("127.0.0.1", "127.0.0.2", "::1", "localhost"):
        assert status(ServerSettings(host=closed), host=host) == 403


@pytest.mark.parametrize(
    ("host", "code"),
    [
        ("host.docker.internal:11435", 200),
        ("host.containers.internal", 200),
        ("evil.example", 403),
        ("evil.example.", 403),
        ("moeinf.", 403),
        (".", 403),
        ("", 403),
    ],
)
@pytest.mark.parametrize("address", ["127.0.0.1", "0.0.0.0"])
def test_names_with_a_dot_are_refused_at_any_address(host: str, code: int, address: str) -> None:
    assert status(ServerSettings(host=address), host=host) == code


@pytest.mark.parametrize("origin", [*APPS, "http://0.0.0.0:8080"])
def test_apps_may_ask(origin: str) -> None:
    assert status(ServerSettings(), origin=origin) == 200


@pytest.mark.parametrize(
    "origin",
    [
        "null",
        "http://app",
        "https://tauri.example",
        "app:evil",
        "xapp://x",
        "http://evil.example/app://x",
        "chrome-extension://abc",
        "http://moeinf",
    ],
)
@pytest.mark.parametrize("address", ["127.0.0.1", "0.0.0.0"])
def test_other_origins_are_refused(origin: str, address: str) -> None:
    assert status(ServerSettings(host=address), origin=origin) == 403


@pytest.mark.parametrize("host", ["192.168.1.7:11435", "[fd00::7]:11435", "10.0.0.7"])
def test_the_page_of_this_server_may_ask(host: str) -> None:
    """A browser names the origin of a page in its POSTs, also to the server that sent the page."""
    for scheme in ("http", "https"):  # https: behind a proxy
        assert status(ServerSettings(), host=host, origin=f"{scheme}://{host}") == 200


@pytest.mark.parametrize(
    ("host", "origin"),
    [
        ("192.168.1.7:11435", "http://192.168.1.7:8080"),  # a page of another server there
        ("192.168.1.7:11435", "http://192.168.1.8:11435"),
        ("192.168.1.7:11435", "http://192.168.1.7:11435.evil.example"),
        ("192.168.1.7:11435", "ftp://192.168.1.7:11435"),
        ("box.local:11435", "http://box.local:11435"),  # a name may be rebound
        ("moeinf:11435", "http://moeinf:11435"),
    ],
)
def test_a_page_at_a_name_or_of_another_server_may_not(host: str, origin: str) -> None:
    assert status(ServerSettings(host="0.0.0.0"), host=host, origin=origin) == 403


MACHINE = socket.gethostname().lower().partition(".")[0]


@pytest.mark.parametrize(
    "host",
    [
        "localhost@evil.example",
        "evil.example@localhost",
        "user:word@localhost:11435",
        "[localhost]",
        "[evil.example]",
        "[::1]evil.example",
        "[::1",
        "::1",
        "[127.0.0.1]evil.internal:11435",
        ".localhost",
        ".internal",
        "..internal:11435",
        "a..internal",
        ".evil.internal",
        "-.internal",
        "localhost:",
        "localhost:port",
        "localhost:70000",
        "localhost:11435:11435",
        "localhost/evil.example",
        "localhost?a.internal",
        "localhost evil.internal",
        "evil.example,localhost",
        "evil.example\\.internal",
        f"evil.{MACHINE}.local",
        "evil.local",
    ],
)
@pytest.mark.parametrize("address", ["127.0.0.1", "0.0.0.0"])
def test_hosts_with_more_than_a_name_and_a_port(host: str, address: str) -> None:
    assert status(ServerSettings(host=address), host=host) == 403


@pytest.mark.parametrize(
    "host", ["LOCALHOST:80", "[::1]:11435", "127.0.0.1", "a.b.localhost", f"{MACHINE}.local:1"]
)
def test_hosts_as_programs_write_them(host: str) -> None:
    assert status(ServerSettings(), host=host) == 200


@pytest.mark.parametrize(
    "origin",
    [
        "localhost",
        "localhost:3000",
        "//localhost",
        "://localhost",
        "http:localhost",
        "http:/localhost",
        "ftp://localhost",
        "http://user@localhost",
        "http://evil.example@localhost",
        "http://[localhost]",
        "http://.localhost",
        "http://localhost/",
        "http://localhost#evil",
        "app://a@evil.example/",
        "http://localhost, http://evil.example",
        "chat.example",  # a name of the server, and no origin
    ],
)
def test_origins_without_a_scheme_or_with_more_than_a_host(origin: str) -> None:
    assert status(ServerSettings(origins=("chat.example",)), origin=origin) == 403


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("GET", "/api/plan?model=demo", False),
        ("GET", "/api/simulate?model=demo", False),
        ("GET", "/api/experts?model=demo", False),
        ("GET", "/api/tags", False),
        ("GET", "/metrics", False),
        ("POST", "/api/generate", False),
        ("GET", "/", True),  # a link to the page
        ("GET", "/page/app.js", True),
        ("GET", "/health", True),
    ],
)
def test_pages_of_other_sites_start_no_work(
    method: str, path: str, allowed: bool, open_address: str
) -> None:
    """A browser sends no Origin for a picture, a script or a link."""
    foreign = {"Sec-Fetch-Site": "cross-site", "Authorization": "Bearer secret"}
    answer = httpx.request(method, f"{open_address}{path}", headers=foreign, timeout=60)
    assert (answer.status_code == 403) is not allowed
    if not allowed:
        assert "unknown_origin" in answer.text
        own = {**foreign, "Sec-Fetch-Site": "same-origin"}
        assert httpx.get(f"{open_address}/api/tags", headers=own).status_code == 200
        named = {**foreign, "Origin": "http://localhost:3000"}
        assert httpx.get(f"{open_address}/api/tags", headers=named).status_code == 200


def test_a_scheme_in_the_settings() -> None:
    """Extensions of a browser have a scheme of their own, as OLLAMA_ORIGINS takes it."""
    settings = ServerSettings(origins=("chrome-extension://*", "https://a.example"))
    assert status(settings, origin="chrome-extension://abc") == 200
    assert status(settings, origin="moz-extension://abc") == 403
    assert status(settings, origin="https://a.example") == 200
    assert status(settings, origin="https://a.example.evil") == 403
    assert status(settings, host="*") == 403


@pytest.fixture(scope="module")
def open_address(demo_home: Path) -> Iterator[str]:
    with serving(demo_home, host="0.0.0.0", api_key="secret") as address:
        yield address


@pytest.mark.parametrize("origin", APPS)
def test_a_page_of_an_app_reads_the_answer(origin: str, open_address: str) -> None:
    """Its browser asks first, and both answers allow the origin."""
    asks = {"Origin": origin, "Access-Control-Request-Method": "POST"}
    asks["Access-Control-Request-Headers"] = "authorization, content-type"
    before = httpx.options(f"{open_address}/api/chat", headers=asks)
    headers = {"Origin": origin, "Authorization": "Bearer secret"}
    answer = httpx.get(f"{open_address}/api/tags", headers=headers)
    for one in (before, answer):
        assert one.status_code == 200
        assert one.headers["access-control-allow-origin"] == origin


def test_a_container_asks_by_name(open_address: str) -> None:
    headers = {"Host": "moeinf:11435", "Authorization": "Bearer secret"}
    assert httpx.get(f"{open_address}/api/tags", headers=headers).status_code == 200
    foreign = {**headers, "Host": "evil.example"}
    assert httpx.get(f"{open_address}/api/tags", headers=foreign).status_code == 403


def test_a_refusal_has_the_form_of_its_api(open_address: str) -> None:
    with openai.OpenAI(base_url=f"{open_address}/v1", api_key="wrong", max_retries=0) as client:
        with pytest.raises(openai.AuthenticationError) as wrong:
            client.models.list()
        assert (wrong.value.code, wrong.value.type) == ("invalid_api_key", "invalid_request_error")
    told = httpx.get(f"{open_address}/v1/models", headers={"Host": "evil.example"}).json()
    assert told["error"]["code"] == "unknown_host"
    told = httpx.get(f"{open_address}/api/tags", headers={"Host": "evil.example"}).json()
    assert (told["code"], type(told["error"])) == ("unknown_host", str)


def test_every_operation_refuses_a_foreign_page_name_and_key(open_address: str) -> None:
    """Read from the OpenAPI document, so that a new endpoint is tested, too."""
    key = {"Authorization": "Bearer secret"}
    document = httpx.get(f"{open_address}/openapi.json", headers=key).json()
    asked = [(m, path) for path, about in document["paths"].items() for m in about]
    changing = [one for one in asked if one[0] != "get"]
    assert len(changing) > 15
    assert {("post", "/api/memory"), ("delete", "/api/delete"), ("post", "/api/pull")} < set(
        changing
    )
    with httpx.Client(base_url=open_address, timeout=60) as client:
        for method, path in asked:
            for headers, status in (
                ({**key, "Origin": "http://evil.example"}, 403),
                ({**key, "Host": "evil.example"}, 403),
                ({"Authorization": "Bearer wrong"}, 401),
            ):
                if status == 401 and path in ("/", "/health", "/api/version"):
                    continue
                answer = client.request(method, path, headers=headers, content=b"{}")
                assert answer.status_code == status, (method, path, headers)


@pytest.mark.parametrize(
    ("method", "path", "code"),
    [
        ("GET", "/v1/nowhere", "unknown_path"),
        ("POST", "/v1/models", "wrong_method"),
        ("GET", "/v1/models/nothing", "model_not_found"),
    ],
)
def test_unknown_names_have_the_form_of_their_api(
    method: str, path: str, code: str, address: str
) -> None:
    told = httpx.request(method, f"{address}{path}").json()["error"]
    assert (told["code"], told["type"], told["param"]) == (code, "invalid_request_error", None)
    ours = httpx.request(method, address + path.replace("/v1/models", "/api/tags")).json()
    if path != "/v1/nowhere":
        assert isinstance(ours["error"], str)
