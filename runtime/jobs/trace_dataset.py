"""Run prompts one after the other to record their experts in the EAMC; can be interrupted.

The engine adds the routing of every request.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from moeinf.errors import FileError
from moeinf.offload.routing.recording_file import recording_to_bytes
from moeinf.offload.routing.trace import Recording
from moeinf.runtime.eamc.kept_recording import drop_oldest, keep
from moeinf.runtime.engine.engine import Engine
from moeinf.runtime.files.atomic import write_bytes_durably
from moeinf.runtime.generation.generate import Generation
from moeinf.runtime.generation.seq2seq import Languages, converse
from moeinf.runtime.jobs.datasets.items import Item
from moeinf.runtime.requests import Limits, PromptTooLong, SamplingOptions


@dataclass
class Traced:
    """The result of a trace; `entries` of `capacity` are in the EAMC now."""

    requests: int = 0
    skipped: int = 0  # prompts that do not fit the context
    prompt_tokens: int = 0
    tokens: int = 0
    hit_rate: float | None = None
    entries: int = 0
    capacity: int = 0
    interrupted: bool = False


def trace_items(
    engine: Engine,
    items: Sequence[Item],
    options: SamplingOptions,
    max_tokens: int,
    languages: Languages,
    *,
    raw: bool,
    name: str,
    out: Path | None,
    stopped: Callable[[], bool],
    advance: Callable[[], None],
) -> Traced:
    """Run every item as a request; keep the newest in the model's recording, also when stopped.

    With `out` a recording of all, with weights and hints, is written, too.
    Raises BadLanguage, and OSError when a recording cannot be written. A missing folder is
    reported before anything runs.
    """
    eamc = engine.tracing.eamc
    if eamc is None or not engine.tracing.on:
        raise FileError("nothing can be recorded: the home cannot be written, or trace is off")
    if out is not None and not out.parent.is_dir():
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(out.parent))
    done, recording = Traced(capacity=eamc.capacity), engine.record(name, out is not None)
    try:
        for item in items:
            if stopped():
                done.interrupted = True
                break
            conversation = converse(engine, languages=languages)
            ask = conversation.complete if raw else conversation.ask
            _run(ask, item, options, max_tokens, stopped, done, recording)
            if out is None:
                drop_oldest(recording)
            if not done.interrupted:
                advance()
    finally:
        if recording.passes:
            if out is not None:
                write_bytes_durably(out, recording_to_bytes(recording))
            if done.requests:
                keep(recording, eamc.recording)
    done.hit_rate = engine.store.stats.hit_rate
    done.entries = len(eamc.load())
    return done


def _run(
    ask: Callable[..., Generation],
    item: Item,
    options: SamplingOptions,
    max_tokens: int,
    stopped: Callable[[], bool],
    done: Traced,
    recording: Recording,
) -> None:
    try:
        answer = ask(item.prompt, options, Limits(max_tokens), stopped)
    except PromptTooLong:
        done.skipped += 1
        return
    for _ in answer:
        pass
    done.interrupted = answer.finish_reason == "interrupted"
    if answer.counted:  # else it was stopped before its prompt was read
        done.requests += 1
        done.prompt_tokens += answer.prompt_tokens
        done.tokens += len(answer.tokens)
        recording.labels[answer.request] = item.task
