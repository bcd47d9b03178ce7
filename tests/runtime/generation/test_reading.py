"""Test that a conversation reports how much of a prompt is read."""

from __future__ import annotations

from pathlib import Path

from moeinf.runtime.config import PREFILL_CHUNK, EngineConfig, Settings
from moeinf.runtime.engine.engine import Engine
from moeinf.runtime.generation.chat import Conversation
from moeinf.runtime.library.library import Library
from moeinf.runtime.requests import Limits, SamplingOptions
from moeinf.runtime.sizes import parse_memory

GREEDY = SamplingOptions(temperature=0)


def test_each_chunk_is_reported_and_cached_tokens_count_as_read(demo_home: Path) -> None:
    settings, found = Settings(demo_home), list[tuple[int, int]]()
    manifest, folder = Library(settings).read("demo")
    with Engine.open(manifest, folder, EngineConfig(context=512), settings) as engine:
        talk = Conversation(engine)
        talk.reading = lambda read, count: found.append((read, count))
        long = talk.ask("17+25= " * 40, GREEDY, Limits(max_tokens=2))
        list(long)
        total = long.prompt_tokens
        assert PREFILL_CHUNK < total < 2 * PREFILL_CHUNK
        assert found == [(0, total), (PREFILL_CHUNK, total)]
        found.clear()
        short = talk.ask("17+25=", GREEDY, Limits(max_tokens=2))
        list(short)
        cached = short.prompt_tokens - short.prefilled_tokens
        assert cached > total
        assert found == [(cached, short.prompt_tokens)]


def test_a_window_is_reported_layer_by_layer(demo_home: Path) -> None:
    """A model with experts on disk reads two chunks at once; reports come at each layer."""
    settings, found = Settings(demo_home), list[int]()
    manifest, folder = Library(settings).read("demo")
    config = EngineConfig(memory=parse_memory("30%"), context=512)
    with Engine.open(manifest, folder, config, settings) as engine:
        talk = Conversation(engine)
        talk.reading = lambda read, count: found.append(read)
        long = talk.ask("17+25= " * 40, GREEDY, Limits(max_tokens=2))
        list(long)
        assert engine.window == 2 * PREFILL_CHUNK >= long.prompt_tokens
    total, layers = long.prompt_tokens, manifest.layers
    assert found == [0, *(layer * total // layers for layer in range(layers))]
