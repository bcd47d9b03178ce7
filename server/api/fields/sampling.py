"""The fields of a request that choose tokens, in OpenAI's APIs and Anthropic's."""

from __future__ import annotations

from pydantic import Field

from moeinf.runtime.requests import SamplingOptions
from moeinf.server.api.fields.other import Lenient

_NAMES = (
    "temperature", "top_p", "top_k", "min_p", "seed", "presence_penalty", "frequency_penalty",
    "repeat_penalty", "repeat_last_n",
)  # fmt: skip


class Sampled(Lenient):
    """The sampling fields; those that an API does not define have the names of other engines.

    repetition_penalty is transformers' name: it counts all tokens before, and repeat_penalty the
    last repeat_last_n.
    """

    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, ge=0, le=1)
    top_k: int | None = Field(None, ge=-1)
    min_p: float | None = None
    repetition_penalty: float | None = Field(None, ge=0.01, le=100)
    repeat_penalty: float | None = None
    repeat_last_n: int | None = None
    seed: int | None = None
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)

    def sampling(self) -> SamplingOptions:
        """Return the options that the request sets. Raises InvalidValue."""
        chosen = SamplingOptions()
        if self.repetition_penalty is not None:
            chosen = SamplingOptions(repeat_penalty=self.repetition_penalty, repeat_last_n=-1)
        for name in _NAMES:
            value = getattr(self, name)
            if name == "top_k" and value == -1:
                value = 0  # vLLM's name for all tokens
            if value is not None:
                chosen = chosen.having(name, value)
        return chosen
