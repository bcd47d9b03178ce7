"""Test the promises of the container files and the compose file: no root, no open port."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from moeinf.runtime.config import ServerSettings, read_environment, read_server_environment

PACKAGING = Path(__file__).parents[2] / "packaging"
DOCKERFILE = (PACKAGING / "container/Dockerfile").read_text()
CUDA = (PACKAGING / "container/Dockerfile.cuda").read_text()


def instructions(text: str, name: str) -> list[str]:
    joined = re.sub(r"\\\n", " ", re.sub(r"^#.*\n", "", text, flags=re.MULTILINE))
    return re.findall(rf"^{name} (.*)$", joined, re.MULTILINE)


@pytest.mark.parametrize("text", [DOCKERFILE, CUDA])
def test_the_last_user_is_not_root(text: str) -> None:
    assert instructions(text, "USER")[-1] == "10001"


def test_the_variables_are_those_that_the_server_reads() -> None:
    last = DOCKERFILE[DOCKERFILE.rindex("\nFROM ") :]
    (line,) = instructions(last, "ENV")
    variables = dict(word.split("=", 1) for word in line.split())
    assert read_environment(variables).home == Path("/models")
    server = read_server_environment(variables)
    assert server.host == "0.0.0.0"
    assert instructions(last, "EXPOSE") == [str(server.port)]
    assert f":{server.port}/health" in instructions(last, "HEALTHCHECK")[0]


def test_compose_publishes_to_this_machine_only() -> None:
    services = yaml.safe_load((PACKAGING / "container/compose.yaml").read_text())["services"]
    ports = [port for service in services.values() for port in service["ports"]]
    assert len(ports) == 2
    assert all(port.startswith("127.0.0.1:") for port in ports)
    own, page = services["moeinf"], services["open-webui"]
    assert (own["cap_drop"], own["read_only"]) == (["ALL"], True)
    assert page["environment"]["OLLAMA_BASE_URL"].endswith(f":{ServerSettings().port}")
    built = PACKAGING / "container" / own["build"]["context"] / own["build"]["dockerfile"]
    assert built.read_text() == DOCKERFILE
