"""Test `moeinf launch`: what clients need, and a program that is started with it."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from moeinf.cli.chat.coding_clients import CLIENTS
from tests.cli.conftest import COMMAND, Command, environment
from tests.server.conftest import serving

FAKE = """#!{python}
import json, os, sys
print(json.dumps([sys.argv[1:], dict(os.environ)]))
"""


@pytest.fixture(scope="module")
def address(demo_home: Path) -> Iterator[str]:
    with serving(demo_home) as found:
        yield found


@pytest.mark.parametrize("client", CLIENTS)
def test_what_a_client_needs(moeinf: Command, client: str) -> None:
    shown = json.loads(moeinf("launch", client, "demo", "--json").out)
    assert (shown["client"], shown["model"]) == (client, "demo:bf16")
    text = moeinf("launch", client, "demo", "--print").out
    script = f"exec 3>&1; {client}() {{ env; }}\n{text}"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True)
    found = dict(line.split("=", 1) for line in done.stdout.splitlines() if "=" in line)
    for name, value in shown["environment"].items():
        assert found.get(name, value) == value  # bash exports what it was told
    assert found.items() >= {(k, v) for k, v in shown["environment"].items() if k != "_"}


def test_the_settings_of_clients(moeinf: Command) -> None:
    codex = json.loads(moeinf("launch", "codex", "demo", "--json", "--", "exec", "hi").out)
    options = [tomllib.loads(codex["arguments"][place]) for place in (1, 3)]
    merged = {**options[0], **options[1], "model": codex["arguments"][5]}
    assert tomllib.loads(codex["content"]) == merged
    assert merged["model_providers"]["moeinf"] == {
        "name": "moeinf",
        "base_url": "http://127.0.0.1:1/v1",
        "env_key": "MOEINF_API_KEY",
        "wire_api": "responses",
        "stream_idle_timeout_ms": 3_600_000,
    }
    assert codex["arguments"][-2:] == ["exec", "hi"]
    opencode = json.loads(moeinf("launch", "opencode", "demo", "--json").out)
    inline = json.loads(opencode["environment"]["OPENCODE_CONFIG_CONTENT"])
    assert inline == json.loads(opencode["content"])
    assert inline["model"] == "moeinf/demo:bf16"
    assert list(inline["provider"]["moeinf"]["models"]) == ["demo:bf16"]


def test_clients_learn_the_context() -> None:
    codex, opencode = (CLIENTS[name].needs("http://h", "m", 8192) for name in ("codex", "opencode"))
    assert tomllib.loads(codex.content)["model_context_window"] == 8192
    assert "model_context_window=8192" in codex.arguments
    models = json.loads(opencode.content)["provider"]["moeinf"]["models"]
    assert models == {"m": {"name": "m", "limit": {"context": 8192, "output": 2048}}}


def codex(arguments: list[str], got: dict[str, str], server: str, context: int) -> list[str]:
    assert arguments[:6:2] == ["-c"] * 3
    options = tomllib.loads("\n".join(arguments[1:6:2]))
    provider = options["model_providers"]["moeinf"]
    assert (options["model_provider"], options["model_context_window"]) == ("moeinf", context)
    assert (provider["base_url"], provider["wire_api"]) == (f"{server}/v1", "responses")
    assert got[provider["env_key"]] == "moeinf"
    assert arguments[6:8] == ["--model", "demo:bf16"]
    return arguments[8:]


def opencode(arguments: list[str], got: dict[str, str], server: str, context: int) -> list[str]:
    config = json.loads(got["OPENCODE_CONFIG_CONTENT"])
    provider = config["provider"]["moeinf"]
    assert config["model"] == "moeinf/demo:bf16"
    assert provider["options"] == {"baseURL": f"{server}/v1", "apiKey": "{env:MOEINF_API_KEY}"}
    limit = {"context": context, "output": context // 4}
    assert provider["models"] == {"demo:bf16": {"name": "demo:bf16", "limit": limit}}
    assert got["MOEINF_API_KEY"] == "moeinf"
    return arguments


def aider(arguments: list[str], got: dict[str, str], server: str, context: int) -> list[str]:
    assert (got["OPENAI_API_BASE"], got["OPENAI_API_KEY"]) == (f"{server}/v1", "moeinf")
    assert arguments[:2] == ["--model", "openai/demo:bf16"]
    return arguments[2:]


@pytest.mark.parametrize("check", [codex, opencode, aider], ids=lambda check: check.__name__)
def test_each_program_gets_its_arguments_and_variables(
    check: Any, address: str, demo_home: Path, tmp_path: Path
) -> None:
    program = tmp_path / check.__name__
    program.write_text(FAKE.format(python=sys.executable))
    program.chmod(0o700)
    env = environment(demo_home) | {"PATH": str(tmp_path)}
    env["MOEINF_HOST"] = address.removeprefix("http://")
    command = [*COMMAND, "launch", check.__name__, "demo", "--", "--last", "a word"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    (loaded,) = httpx.get(f"{address}/api/ps").json()["models"]
    rest = check(*json.loads(done.stdout), address, loaded["context_length"])
    assert rest == ["--last", "a word"]


def test_a_program_is_started(demo_home: Path, tmp_path: Path) -> None:
    program = tmp_path / "claude"
    program.write_text(FAKE.format(python=sys.executable))
    program.chmod(0o700)
    with serving(demo_home) as address:
        env = environment(demo_home) | {"PATH": str(tmp_path), "ANTHROPIC_API_KEY": "other"}
        env["MOEINF_HOST"] = address.removeprefix("http://")

        def ask(*words: str) -> subprocess.CompletedProcess[str]:
            command = [*COMMAND, "launch", *words]
            return subprocess.run(command, env=env, capture_output=True, text=True, check=False)

        done = ask("claude", "demo", "--", "-p", "hi")
        arguments, got = json.loads(done.stdout)
        assert arguments == ["-p", "hi"]
        assert got["ANTHROPIC_BASE_URL"] == address
        assert got["ANTHROPIC_MODEL"] == "demo:bf16"
        assert got["API_TIMEOUT_MS"] == "3600000"
        (loaded,) = httpx.get(f"{address}/api/ps").json()["models"]
        assert got["CLAUDE_CODE_MAX_CONTEXT_TOKENS"] == str(loaded["context_length"])
        assert "ANTHROPIC_API_KEY" not in got
        assert f"with demo:bf16 of the server at {address}" in done.stderr
        assert "calls no tools" in done.stderr
        missing = ask("codex", "demo", "--quiet")
        assert missing.returncode == 1
        assert "npm install -g @openai/codex" in missing.stderr
        assert "pull nothing" in ask("claude", "nothing").stderr
        env["MOEINF_API_KEY"] = "secret"  # this process has not entered the server in run/
        assert "gets no MOEINF_API_KEY" in ask("claude", "demo").stderr
    assert "`moeinf serve`" in ask("claude", "demo").stderr
