"""Run openai-python's own resource tests, from its sdist, against this server with the demo.

Their mock server is replaced through TEST_API_BASE_URL, and openai_resource_plugin.py completes
the requests for responses. The tests left out, with reasons, are in
tests/server/openai_exclusions.txt.

    pip download --no-deps --no-binary openai openai && tar xzf openai-*.tar.gz
    python -m venv theirs
    theirs/bin/pip install './openai-3.52.0[aiohttp]' pytest pytest-asyncio rich
    python scripts/openai_resource_tests.py openai-3.52.0 theirs/bin/python

They have an environment of their own, because their plugins change how other tests run.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from moeinf.runtime.checkpoints.checkpoint import open_checkpoint
from moeinf.runtime.config import EngineConfig, ServerSettings, Settings
from moeinf.runtime.library.library import DEMO_CHECKPOINT, Library
from moeinf.runtime.library.repacking.repack import repack
from moeinf.runtime.library.sources import LocalSource
from moeinf.runtime.names import parse_name
from moeinf.runtime.sizes import parse_memory
from moeinf.server.serve import make_server

EXCLUSIONS = Path(__file__).parents[1] / "tests" / "server" / "openai_exclusions.txt"
FILES = (
    "chat/test_completions.py",
    "test_completions.py",
    "test_models.py",
    "test_responses.py",
    "responses/test_input_items.py",
    "responses/test_input_tokens.py",
)
NAMES = ("gpt-6-astra", "gpt-3.5-turbo-instruct")  # the models that the tests request


@contextmanager
def serving(home: Path) -> Iterator[str]:
    """Yield the address of a server that has the demo under the tests' names."""
    settings, about = Settings(home), ServerSettings(port=0)
    for name in NAMES:
        source = LocalSource(open_checkpoint(DEMO_CHECKPOINT), "demo")
        repack(source, Library(settings), parse_name(name), lambda *_: None, lambda _: None)
    config = EngineConfig(memory=parse_memory("100%"), parallel=about.parallel, trace=False)
    server = make_server(settings, about, config)
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        sock.listen()  # so that a client that connects before the server is up waits for it
        thread = threading.Thread(target=lambda: asyncio.run(server.serve([sock])))
        thread.start()
        try:
            yield f"http://127.0.0.1:{sock.getsockname()[1]}/v1"
        finally:
            server.should_exit = True
            thread.join()


def deselected() -> Iterator[str]:
    """Yield the pytest options for the exclusions; names are prefixes, parameters may follow."""
    for line in EXCLUSIONS.read_text().splitlines():
        if line.startswith("#"):
            continue
        file, operation = line.partition(":")[0].split()
        words = file.removesuffix(".py").rpartition("test_")[2].split("_")
        resource = "".join(map(str.capitalize, words))
        for kind in ("method", "raw_response", "streaming_response"):
            for form in ("", "Async"):
                test = f"Test{form}{resource}::test_{kind}_{operation}"
                yield f"--deselect=tests/api_resources/{file}::{test}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("sdist", type=Path, help="the unpacked sdist")
    parser.add_argument("python", help="an interpreter with openai and its tests' needs")
    given = parser.parse_args()
    tests = [f"tests/api_resources/{file}" for file in FILES]
    options = ["-c", "pyproject.toml", "-o", "addopts=", "-p", "no:cacheprovider", "-q"]
    options += ["-p", "openai_resource_plugin"]
    with tempfile.TemporaryDirectory() as home, serving(Path(home)) as address:
        return subprocess.run(
            [Path(given.python).absolute(), "-m", "pytest", *options, *deselected(), *tests],
            cwd=given.sdist,
            env={
                **os.environ,
                "TEST_API_BASE_URL": address,
                "PYTHONPATH": str(Path(__file__).parent.absolute()),
            },
            check=False,
        ).returncode


if __name__ == "__main__":
    sys.exit(main())
