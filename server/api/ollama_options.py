"""Read the `options` of Ollama's requests."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from moeinf.runtime.requests import Limits, SamplingOptions
from moeinf.server.api.answers import BadRequest
from moeinf.server.api.bounds import MOST_STOP, MOST_STOPS

# Ollama's options for its own engine, or of its older versions: accepted, without an effect here.
OF_OTHER_ENGINES = (
    "num_batch", "num_gpu", "main_gpu", "num_thread", "num_keep", "use_mmap", "use_mlock", "numa",
    "low_vram", "vocab_only", "f16_kv", "logits_all", "penalize_newline",
    "typical_p", "tfs_z", "mirostat", "mirostat_eta", "mirostat_tau",
    "embedding_only", "num_gqa", "rope_frequency_base", "rope_frequency_scale",
)  # fmt: skip
SAMPLING = tuple(option.name for option in fields(SamplingOptions))
_OTHER_NAMES = {"repetition_penalty": "repeat_penalty"}


def sampling(options: dict[str, Any]) -> tuple[SamplingOptions, Limits]:
    """Parse Ollama's options; ignore unknown ones, as Ollama does. Raises BadRequest."""
    chosen, most, drafts = SamplingOptions(), None, None
    stop: tuple[str, ...] = ()
    for said, value in options.items():
        name = _OTHER_NAMES.get(said, said)
        if value is None:
            continue
        try:
            if name == "num_predict":
                most = None if int(value) < 0 else int(value)
            elif name == "draft_num_predict":
                drafts = None if int(value) < 0 else int(value)
            elif name == "stop":
                stop = _stops(value)
            elif name in SAMPLING:
                chosen = chosen.having(name, value)
        except (OverflowError, TypeError, ValueError) as error:
            raise BadRequest(str(error)) from error
    return chosen, Limits(most, stop, drafts)


def context_of(options: dict[str, Any]) -> int | None:
    """Return the context, in tokens, that a request wants the model to have. Raises BadRequest."""
    value = options.get("num_ctx")
    try:
        context = None if value is None else int(value)
    except (OverflowError, TypeError, ValueError):
        raise BadRequest(f"num_ctx must be an integer, got {str(value)[:80]}", "num_ctx") from None
    if context is not None and context < 1:
        raise BadRequest(f"num_ctx must be at least 1, got {context}", "num_ctx")
    return context


def without_effect(options: dict[str, Any]) -> list[str]:
    """Return the names of the options that have no effect."""
    read = {"num_predict", "num_ctx", "stop", "draft_num_predict", *SAMPLING, *_OTHER_NAMES}
    return [name for name, value in options.items() if value is not None and name not in read]


def _stops(value: Any) -> tuple[str, ...]:
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise BadRequest("stop: the value is invalid (expected a text or a list of texts)")
    if len(texts) > MOST_STOPS:
        raise BadRequest(f"stop: {len(texts)} texts are too many (expected {MOST_STOPS} at most)")
    if any(len(text) > MOST_STOP for text in texts):
        raise BadRequest(f"stop: a text is too long (expected {MOST_STOP} characters at most)")
    return tuple(texts)
