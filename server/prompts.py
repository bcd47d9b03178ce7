"""Messages as both APIs send them, rendered to token ids with the model's own template.

Does not know endpoints. Runs on the engine's thread. Never takes a template from a request.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from moeinf.runtime.engine import Engine

Message = Mapping[str, Any]  # role, content, and what else the template may look at


def chat_prompt(
    engine: Engine,
    messages: Sequence[Message],
    tools: Sequence[Any] = (),
    think: bool | None = None,
) -> list[int]:
    """Token ids that end where the assistant's answer begins. Raises TemplateError."""
    tokenizer = engine.tokenizer
    if engine.template is None:  # a base model: it continues the text
        text = "\n\n".join(str(message.get("content") or "") for message in messages)
        return tokenizer.encode_text(text, plain=True)
    guarded = [{**m, "content": tokenizer.guard(str(m.get("content") or ""))} for m in messages]
    extra: dict[str, Any] = {}
    if tools:
        extra["tools"] = list(tools)
    if think is not None:
        extra["enable_thinking"] = think
    rendered = engine.template.render(
        guarded,
        add_generation_prompt=True,
        bos_token=tokenizer.bos or "",
        eos_token=tokenizer.eos or "",
        **extra,
    )
    return tokenizer.encode_rendered(rendered)


def text_prompt(engine: Engine, text: str) -> list[int]:
    """A prompt without a template; special tokens in it count."""
    return engine.tokenizer.encode_text(text)


def embedding_prompt(engine: Engine, given: str | Sequence[int], truncate: bool) -> list[int]:
    """Token ids of a text that is embedded; special tokens in it are text. Or ids as they are.

    truncate: what is longer than the context is cut at its end. Raises ValueError for ids that the
    model has not.
    """
    if isinstance(given, str):
        ids = engine.tokenizer.encode_text(given, plain=True)
    else:
        ids = list(given)
        if any(not 0 <= token < engine.model.vocab_size for token in ids):
            raise ValueError("input has ids that are no tokens of this model")
    return ids[: engine.placement.context - 1] if truncate else ids
