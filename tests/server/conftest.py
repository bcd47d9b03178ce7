"""Start a server with the demo on a free port, in this process."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import ollama
import openai
import pytest
import uvicorn

from moeinf.runtime.config import EngineConfig, PrefixBudget, ServerSettings, Settings
from moeinf.runtime.sizes import parse_memory
from moeinf.server.serve import make_server


@contextmanager
def serving(
    home: Path,
    memory: str = "100%",
    trace: bool = False,
    context: int | None = None,
    reproducible: bool = True,
    prefix: PrefixBudget | None = None,
    **settings: object,
) -> Iterator[str]:
    """Start a server that reuses whole chunks, yield its address, and end it after the block."""
    about = ServerSettings(port=0, **settings)  # type: ignore[arg-type]
    config = EngineConfig(
        memory=parse_memory(memory),
        parallel=about.parallel,
        trace=trace,
        context=context,
        reproducible=reproducible,
        prefix=prefix,
    )
    server: uvicorn.Server = make_server(Settings(home), about, config)
    with socket.socket() as sock:
        sock.bind((about.host, 0))
        port = sock.getsockname()[1]
        thread = threading.Thread(target=lambda: asyncio.run(server.serve([sock])), daemon=True)
        thread.start()
        address = f"http://127.0.0.1:{port}"
        for _ in range(200):
            try:
                httpx.get(f"{address}/health", timeout=1)
                break
            except httpx.TransportError:
                threading.Event().wait(0.05)
        try:
            yield address
        finally:  # a failed test must not disturb the next one
            server.should_exit = True
            thread.join(30)
        assert not thread.is_alive()


@pytest.fixture(scope="module")
def address(demo_home: Path) -> Iterator[str]:
    with serving(demo_home, parallel=4) as found:
        yield found


@pytest.fixture
def openai_client(address: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{address}/v1", api_key="any", max_retries=0) as client:
        yield client


@pytest.fixture
def ollama_client(address: str) -> Iterator[ollama.Client]:
    client = ollama.Client(address)
    yield client
    client._client.close()
