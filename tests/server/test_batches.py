"""Requests that are answered together get, bit for bit, what each gets alone, for every tag."""

from __future__ import annotations

import queue
import threading
from pathlib import Path

import pytest
import torch

from moeinf.runtime.config import EngineConfig, Settings
from moeinf.runtime.engine.engine import Engine
from moeinf.runtime.generation.events import Ended, Event, Piece, TokenInfo
from moeinf.runtime.library.library import Library
from moeinf.runtime.requests import Limits, SamplingOptions
from moeinf.runtime.sizes import parse_memory
from moeinf.server.engines.jobs import Job
from moeinf.server.engines.worker import Worker
from scripts.make_checkpoint import byte_tokenizer
from tests.conftest import pull
from tests.tiny import save_tiny
from tests.tiny_mxfp4 import save_mxfp4

TOKENS = 9
PROMPTS = [[(7 * place + 3 * number) % 97 for place in range(5 + number)] for number in range(3)]
CASES = [
    (name, tag)
    for name in ("olmoe", "deepseek-v3", "qwen3.5", "gpt-oss")
    for tag in ("f32", "bf16", "q8", "q4")
]


def answers(worker: Worker, prompts: list[list[int]]) -> list[list[TokenInfo]]:
    """Ask all prompts at once; return every token's log-probabilities for each."""
    heard: list[queue.Queue[Event]] = [queue.Queue() for _ in prompts]
    together = threading.Event()

    def prepare(prompt: list[int]) -> list[int]:
        assert together.wait(30)  # so that no answer begins before all are asked
        return prompt

    for prompt, events in zip(prompts, heard, strict=True):
        options, limits = SamplingOptions(temperature=0), Limits(TOKENS)
        make = lambda _, prompt=prompt: prepare(prompt)  # noqa: E731
        worker.submit(Job(make, options, limits, events.put, logprobs=97))
    together.set()
    found = []
    for events in heard:
        infos = []
        while isinstance(event := events.get(timeout=60), Piece):
            assert event.info is not None
            infos.append(event.info)
        assert isinstance(event, Ended)
        found.append(infos)
    return found


@pytest.mark.parametrize(("name", "tag"), [*CASES, ("gpt-oss-blocks", "mxfp4")])
def test_together_as_alone(
    name: str, tag: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if tag == "mxfp4":
        save_mxfp4(tmp_path / "tiny")
    else:
        save_tiny(name, tmp_path / "tiny", dtype=torch.float32)
    byte_tokenizer().save(str(tmp_path / "tiny" / "tokenizer.json"))
    settings = Settings(tmp_path / "home")
    manifest = pull(tmp_path / "tiny", settings, f"tiny:{tag}")
    folder = Library(settings).folder(manifest.model)
    rows: list[int] = []
    step = Engine.step

    def counted(engine: Engine, tokens: list[tuple[object, int]]) -> object:
        rows.append(len(tokens))
        return step(engine, tokens)  # type: ignore[arg-type]

    monkeypatch.setattr(Engine, "step", counted)
    config = EngineConfig(memory=parse_memory("100%"), trace=False, parallel=3, reproducible=True)
    worker = Worker(
        lambda: Engine.open(manifest, folder, config, settings), parallel=3, max_queue=9
    )
    try:
        alone = [answers(worker, [prompt])[0] for prompt in PROMPTS]
        assert set(rows) == {1}
        rows.clear()
        assert answers(worker, PROMPTS) == alone
        assert max(rows) == (1 if tag == "f32" else 3)
    finally:
        worker.close()
