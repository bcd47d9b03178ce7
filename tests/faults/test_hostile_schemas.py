"""Schemas that kill, hang or fill the compiling process; a server that ends such a process."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import httpx
import pytest

from moeinf.server import serve
from moeinf.server.engines import model_manager
from tests.cli.conftest import environment
from tests.faults.conftest import Tally
from tests.runtime.sampling.test_grammar_processes import HOSTILE
from tests.server.conftest import serving

ASK = {"model": "demo", "prompt": "17+25=", "stream": False, "options": {"temperature": 0}}
SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
SCHEMA["additionalProperties"] = False
_HANGS = """
import ctypes, sys
from moeinf.runtime.engine.engine import Engine
from moeinf.server import serve
from moeinf.server.engines import model_manager

def hang(*given):
    print("hangs", flush=True)
    while True:
        ctypes.CDLL(None).pause()  # a native call: without the GIL, and for ever

setattr(Engine, sys.argv[1], hang)
serve._GOODBYE_SECONDS, model_manager._LAST_CLOSE_S, serve._END_SECONDS = 1, 0.5, 2.5
sys.argv = ["moeinf", "serve", "--port", "0"]
from moeinf.cli.entry import main
main()
"""


def test_other_requests_go_on(demo_home: Path, tally: Tally) -> None:
    """The only place is free while a hostile schema is compiled."""
    with ThreadPoolExecutor(8) as pool, serving(demo_home, parallel=1) as address:
        ask = partial(httpx.post, f"{address}/api/generate", timeout=60)
        assert ask(json=ASK).json()["response"] == "42"
        for name in ("chain", "patterns", "itself"):
            hostile = pool.submit(ask, json={**ASK, "format": HOSTILE[name]})
            start = time.monotonic()
            assert ask(json=ASK).json()["response"] == "42"
            assert time.monotonic() - start < 4, name
            refused = hostile.result()
            assert refused.status_code == 400, refused.text
            assert refused.json()["error"].startswith("format: ")
            tally("refused in words")
        many = [pool.submit(ask, json={**ASK, "format": HOSTILE["patterns"]}) for _ in range(3)]
        assert ask(json=ASK).json()["response"] == "42"
        assert {one.result().status_code for one in many} == {400}
        body = {"model": "demo", "messages": [{"role": "user", "content": "17+25="}]}
        form = {"type": "json_schema", "json_schema": {"name": "x", "schema": HOSTILE["patterns"]}}
        chat = f"{address}/v1/chat/completions"
        refused = httpx.post(chat, json={**body, "response_format": form}, timeout=60)
        assert refused.status_code == 400
        assert refused.json()["error"]["type"] == "invalid_request_error"
        good = ask(json={**ASK, "format": SCHEMA, "options": {"num_predict": 60}})
        assert good.status_code == 200
        assert re.match(r'\{"n": ?-?\d', good.json()["response"])
        assert not re.search(r"\s\s", good.json()["response"])


@pytest.mark.parametrize(
    ("where", "kind"), [("extend_all", signal.SIGTERM), ("open", signal.SIGINT)]
)
def test_a_signal_ends_a_server_whose_native_call_hangs(
    where: str, kind: signal.Signals, demo_home: Path
) -> None:
    assert serve._GOODBYE_SECONDS + model_manager._LAST_CLOSE_S < serve._END_SECONDS < 10
    with subprocess.Popen(
        [sys.executable, "-c", _HANGS, where],
        env=environment(demo_home),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as server, ThreadPoolExecutor(1) as pool:  # fmt: skip
        assert server.stdout is not None
        assert server.stderr is not None
        try:
            found = re.search(r"http://\S+", server.stderr.readline())
            assert found is not None
            asked = pool.submit(httpx.post, f"{found[0]}/api/generate", json=ASK, timeout=60)
            assert server.stdout.readline() == "hangs\n"
            start = time.monotonic()
            server.send_signal(kind)
            server.wait(20)
            assert time.monotonic() - start < 5
            assert asked.exception() is not None or asked.result().status_code >= 500
        finally:
            server.kill()
