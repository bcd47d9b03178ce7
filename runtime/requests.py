"""Requests to a model: messages, sampling options, and when an answer ends.

A client of a server imports this without an engine, so it imports nothing heavy, not even numpy.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, Literal

from moeinf.errors import ContextExceeded
from moeinf.runtime.invalid import InvalidValue

Role = Literal["system", "user", "assistant"]
Form = str | dict[str, Any] | None  # of an answer: None, "json", or a JSON schema
# The regex engine of tokenizers stops after 10,000,000 steps, and each character of a run takes
# one. The patterns of Qwen2, Llama-3 and DeepSeek-V3 panic at that many spaces.
MAX_TEXT_BYTES = 8 << 20


class PromptTooLong(ContextExceeded):
    """The prompt does not fit the context."""

    code = "prompt_too_long"
    hint = "a shorter prompt, or a larger --ctx"


@dataclass(frozen=True)
class Message:
    role: Role
    content: str


@dataclass(frozen=True)
class Limits:
    """The limits of an answer: it ends after max_tokens, or before a `stop` text.

    max_tokens None: the model's default, or the end of the context, as -1. Without a `stop` those
    of the model count. drafts: the most tokens that a pass may draft, which never changes the
    answer; None: as many as pay. context: of prompt and answer, in tokens; the engine has the
    bound, None: no other.
    """

    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    drafts: int | None = None
    context: int | None = None

    def context_in(self, most: int) -> int:
        """Return the context of this request with an engine whose own is `most`, in tokens."""
        return most if self.context is None else min(self.context, most)

    def over(self, defaults: Limits) -> Limits:
        """Return these limits; `defaults` fills those that are not set, except the context."""
        return Limits(
            defaults.max_tokens if self.max_tokens is None else self.max_tokens,
            self.stop or defaults.stop,
            defaults.drafts if self.drafts is None else self.drafts,
            self.context,
        )


@dataclass(frozen=True)
class SamplingOptions:
    """Sampling options. None: the model's generation_config or Ollama's default decides.

    temperature      0 is greedy: the largest logit, the first of equals
    top_k            keep the k most likely tokens; 0 keeps all
    top_p, min_p     keep the smallest set of this mass; keep what has this share of the best
    repeat_penalty   divides positive and multiplies negative logits of recent tokens (CTRL paper)
    repeat_last_n    how many tokens are recent; -1: the whole context

    Raises InvalidValue for a value outside its range.
    """

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repeat_penalty: float | None = None
    repeat_last_n: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: int | None = None

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            low, high = _RANGE[field.name]
            if value is not None and not low <= value <= high:  # infinity and NaN fail, too
                raise InvalidValue(f"{field.name} must be from {low} to {high}, got {value}")

    def having(self, name: str, value: float | str) -> SamplingOptions:
        """Return these options with one set from a number or its text. Raises InvalidValue."""
        try:
            whole = name in ("top_k", "seed", "repeat_last_n")
            changes: dict[str, Any] = {name: int(value) if whole else float(value)}
        except (OverflowError, ValueError) as error:
            raise InvalidValue(
                f"{name}: {value} is invalid (expected {'an integer' if whole else 'a number'})"
            ) from error
        return replace(self, **changes)

    def over(self, defaults: SamplingOptions) -> SamplingOptions:
        """Return these options; `defaults` fills those that are not set."""
        said = {f.name: getattr(self, f.name) for f in fields(self)}
        return replace(defaults, **{name: v for name, v in said.items() if v is not None})


_RANGE: dict[str, tuple[float, float]] = {
    "temperature": (0, 100),
    "top_k": (0, 2**31),
    "top_p": (0, 1),
    "min_p": (0, 1),
    "repeat_penalty": (0.01, 100),
    "repeat_last_n": (-1, 2**31),
    "presence_penalty": (-100, 100),
    "frequency_penalty": (-100, 100),
    "seed": (-(2**63), 2**64),
}
