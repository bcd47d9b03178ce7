"""A server whose model has another chat template, and says what a test wants it to say.

Everything is real but the choice of tokens: the text of `say` is chosen, token by token.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from moeinf.runtime.config import Settings
from moeinf.runtime.generation import scheduler
from moeinf.runtime.library.library import DEMO_CHECKPOINT
from moeinf.runtime.text.tokenizer import Tokenizer
from tests.conftest import pull
from tests.server.conftest import serving

CHATML = """
{%- if tools %}{{ '<|system|># Tools' }}
{%- for tool in tools %}{{ tool | tojson }}{% endfor %}{{ 'as <tool_call>' }}
{%- endif %}
{%- for message in messages %}
{{- '<|' + message.role + '|>' if message.role != 'tool' else 'tool ' }}
{{- message.tool_call_id or '' }}{{ message.content }}
{%- for call in message.tool_calls or [] %}{{ call.function.name }}
{%- for key, value in call.function.arguments|items %} {{ key }}:{{ value | tojson }}{% endfor %}
{%- endfor %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>' }}
{%- if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}
{%- endif %}"""


class Script:
    """The answers of the model from now on, and the prompts that it has seen."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.prompts: list[str] = []
        self.prompt_ids: list[int] = []  # of the last prompt
        self._tokenizer = Tokenizer(DEMO_CHECKPOINT)
        self._ids: list[int] = []
        monkeypatch.setattr(scheduler, "Sampler", lambda *_: self._begin())

    def say(self, text: str) -> None:
        end = self._tokenizer.token_id("<|end|>")
        assert end is not None
        self._ids = [*self._tokenizer.encode_text(text, plain=True), end]
        begin = self._tokenizer.token_id("<|begin|>")
        self._ids = [token for token in self._ids if token != begin]

    def _begin(self) -> _Chosen:
        return _Chosen(self, list(self._ids))

    def saw(self, ids: list[int]) -> None:
        self.prompt_ids = list(ids)
        self.prompts.append(self._tokenizer._tokenizer.decode(ids, skip_special_tokens=False))


class _Chosen:
    """Chooses the script's tokens where the engine's logits would decide."""

    def __init__(self, script: Script, ids: list[int]) -> None:
        self._script, self._ids = script, ids
        self._fresh = True

    def choose(self, logits: NDArray[np.float32], history: list[int]) -> int:
        assert np.isfinite(logits[self._ids[0]])
        if self._fresh:
            self._script.saw(history)
            self._fresh = False
        return self._ids.pop(0)


def pull_talker(folder: Path, template: str) -> Path:
    """Make a MOEINF_HOME with the demo under another chat template."""
    shutil.copytree(DEMO_CHECKPOINT, folder / "checkpoint")
    (folder / "checkpoint/chat_template.jinja").write_text(template)
    pull(folder / "checkpoint", Settings(folder), "demo:bf16")
    return folder


@contextmanager
def talking(folder: Path, template: str, **settings: Any) -> Iterator[str]:
    """Yield the address of its server."""
    with serving(pull_talker(folder, template), **settings) as address:
        yield address
