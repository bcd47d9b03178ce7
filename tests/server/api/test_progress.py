"""Test that a client can see how much of a long prompt is read."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import ollama
import openai
import pytest

from moeinf.cli.chat.client import Client
from moeinf.cli.chat.remote import RemotePartner
from moeinf.runtime.config import PREFILL_CHUNK, Settings
from moeinf.runtime.requests import Limits, SamplingOptions
from moeinf.server.engines import jobs
from tests.server.conftest import serving
from tests.server.scripted import Script

LONG = " ".join(f"{number} plus {number}" for number in range(40)) + "; 17+25="


@pytest.fixture
def eager(demo_home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Yield a server that reports every step at once, and answers as a script says."""
    Script(monkeypatch).say("sort the small words")
    monkeypatch.setattr(jobs, "QUIET_S", 0.0)
    monkeypatch.setattr(jobs, "EVERY_S", 0.0)
    with serving(demo_home) as address:
        yield address


def test_lines_of_ollama(eager: str) -> None:
    body: dict[str, Any] = {"model": "demo", "prompt": LONG, "raw": True}
    body["options"] = {"num_predict": 12}
    with httpx.stream("POST", f"{eager}/api/generate", json=body, timeout=60) as answer:
        lines = [json.loads(line) for line in answer.iter_lines()]
    progress = [line["prompt_progress"] for line in lines if "prompt_progress" in line]
    done = [one["processed"] for one in progress]
    assert done == sorted(done)
    assert done[0] == progress[0]["cache"] == 0
    assert 0 < done[-1] <= lines[-1]["prompt_eval_count"] == progress[0]["total"]
    first = next(i for i, line in enumerate(lines) if line["response"])
    assert all("prompt_progress" not in line for line in lines[first:])
    whole = httpx.post(f"{eager}/api/generate", json={**body, "stream": False}, timeout=60).json()
    assert whole["response"] == "".join(line["response"] for line in lines)
    assert "prompt_progress" not in whole
    client = ollama.Client(eager)
    said = client.generate("demo", LONG, raw=True, stream=True, options=body["options"])
    assert "".join(part.response for part in said) == whole["response"]
    client._client.close()


@pytest.mark.parametrize("wanted", [False, True])
def test_chunks_of_openai(eager: str, wanted: bool) -> None:
    """Progress is a comment, or chunks as llama.cpp writes them for return_progress."""
    body: dict[str, Any] = {"model": "demo", "prompt": LONG, "stream": True}
    body |= {"return_progress": True} if wanted else {}
    with httpx.stream("POST", f"{eager}/v1/completions", json=body, timeout=60) as answer:
        lines = [line for line in answer.iter_lines() if line]
    comments = [line for line in lines if line.startswith(": prompt ")]
    chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    told = [chunk["prompt_progress"] for chunk in chunks if "prompt_progress" in chunk]
    assert bool(told) == wanted
    assert bool(comments) != wanted
    assert len(comments) + len(chunks) + 1 == len(lines)
    with openai.OpenAI(base_url=f"{eager}/v1", api_key="any", max_retries=0) as client:
        stream = client.completions.create(model="demo", prompt=LONG, stream=True, extra_body=body)
        said = "".join(chunk.choices[0].text for chunk in stream)
    assert said == "".join(chunk["choices"][0]["text"] for chunk in chunks) != ""


def test_ps_and_a_late_error(demo_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While a prompt is read, /api/ps has its numbers; what fails then ends the stream."""
    monkeypatch.setattr(jobs, "QUIET_S", 0.0)
    monkeypatch.setattr(jobs, "EVERY_S", 0.0)
    reached, go_on = threading.Event(), threading.Event()

    def halting(job: jobs.Job, read: int, tokens: int) -> None:
        note(job, read, tokens)
        if read:
            reached.set()
            assert go_on.wait(60)
            raise MemoryError("no room for this window")

    note = jobs.Job._read
    monkeypatch.setattr(jobs.Job, "_read", halting)
    with serving(demo_home) as address:
        body = {"model": "demo", "messages": [{"role": "user", "content": LONG}]}
        with httpx.stream("POST", f"{address}/api/chat", json=body, timeout=60) as answer:
            assert reached.wait(60)
            (model,) = httpx.get(f"{address}/api/ps", timeout=60).json()["models"]
            (prompt,) = model["prompts"]
            assert (prompt["processed"], prompt["cache"]) == (PREFILL_CHUNK, 0)
            assert prompt["total"] > PREFILL_CHUNK
            go_on.set()
            *_, last = answer.iter_lines()
        assert "no room for this window" in json.loads(last)["error"]
        (model,) = httpx.get(f"{address}/api/ps", timeout=60).json()["models"]
        assert model["prompts"] == []


def test_the_repl_of_a_server(eager: str, demo_home: Path) -> None:
    about = httpx.post(f"{eager}/api/show", json={"model": "demo"}).json()
    host, port = eager.removeprefix("http://").split(":")
    partner = RemotePartner(lambda: Client(host, int(port)), about, Settings(demo_home))
    told: list[tuple[int, int]] = []
    partner.reading = lambda read, tokens: told.append((read, tokens))
    answer = partner.say(LONG, SamplingOptions(temperature=0), Limits(8), lambda: False)
    assert [kind for kind, _ in answer]
    assert told
    assert all(0 <= read <= tokens for read, tokens in told)


def test_a_short_prompt_is_not_reported(demo_home: Path) -> None:
    with serving(demo_home) as address:
        body = {"model": "demo", "prompt": "17+25=", "options": {"temperature": 0}}
        with httpx.stream("POST", f"{address}/api/generate", json=body, timeout=60) as answer:
            assert "prompt_progress" not in answer.read().decode()
