"""Read Ollama's options: those of a request, and those that a Modelfile sets by PARAMETER."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from moeinf.runtime.invalid import InvalidValue
from moeinf.runtime.requests import Limits, SamplingOptions

MOST_STOPS = 256
MOST_STOP = 1024  # characters; each token's text is compared with the prefixes of all stop texts
# Ollama's options for its own engine, or of its older versions: accepted, without an effect here.
OF_OTHER_ENGINES = (
    "num_batch", "num_gpu", "main_gpu", "num_thread", "num_keep", "use_mmap", "use_mlock", "numa",
    "low_vram", "vocab_only", "f16_kv", "logits_all", "penalize_newline",
    "typical_p", "tfs_z", "mirostat", "mirostat_eta", "mirostat_tau",
    "embedding_only", "num_gqa", "rope_frequency_base", "rope_frequency_scale",
)  # fmt: skip
SAMPLING = tuple(option.name for option in fields(SamplingOptions))
OTHER_NAMES = {"repetition_penalty": "repeat_penalty"}
OF_LIMITS = ("num_ctx", "num_predict", "stop", "draft_num_predict")
READ = (*SAMPLING, *OF_LIMITS, *OTHER_NAMES)  # the options with an effect


@dataclass(frozen=True)
class Options:
    """Options as values. None: the model's."""

    sampling: SamplingOptions = field(default_factory=SamplingOptions)
    limits: Limits = field(default_factory=Limits)


def read_options(options: Mapping[str, Any]) -> Options:
    """Parse options; a None counts as not given, and an unknown one as absent.

    Raises InvalidValue.
    """
    chosen, most, drafts = SamplingOptions(), None, None
    stop: tuple[str, ...] = ()
    for said, value in options.items():
        name = OTHER_NAMES.get(said, said)
        if value is None:
            continue
        if name == "num_predict":
            most = max(-1, _whole(name, value))
        elif name == "draft_num_predict":
            count = _whole(name, value)
            drafts = None if count < 0 else count
        elif name == "stop":
            stop = _stops(value)
        elif name in SAMPLING:
            try:
                chosen = chosen.having(name, value)
            except TypeError as error:
                raise InvalidValue(f"{name}: the value is invalid (expected a number)") from error
    return Options(chosen, Limits(most, stop, drafts, _context_of(options)))


def _context_of(options: Mapping[str, Any]) -> int | None:
    """Return the context, in tokens, that options request. Raises InvalidValue."""
    value = options.get("num_ctx")
    context = None if value is None else _whole("num_ctx", value)
    if context is not None and context < 1:
        raise InvalidValue(f"num_ctx must be at least 1, got {context}")
    return context


def _whole(name: str, value: Any) -> int:
    try:
        return int(value)
    except (OverflowError, TypeError, ValueError):
        raise InvalidValue(f"{name} must be an integer, got {str(value)[:80]}") from None


def _stops(value: Any) -> tuple[str, ...]:
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list | tuple) or not all(isinstance(text, str) for text in texts):
        raise InvalidValue("stop: the value is invalid (expected a text or a list of texts)")
    if len(texts) > MOST_STOPS:
        raise InvalidValue(f"stop: {len(texts)} texts are too many (expected {MOST_STOPS} at most)")
    if any(len(text) > MOST_STOP for text in texts):
        raise InvalidValue(f"stop: a text is too long (expected {MOST_STOP} characters at most)")
    return tuple(texts)
