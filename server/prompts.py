"""Messages as both APIs send them, rendered to token ids with the model's own template.

Does not know endpoints. Runs on the engine's thread. Never takes a template from a request.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from moeinf.runtime.chat import PromptTooLong
from moeinf.runtime.engine import Engine
from moeinf.server.answers import BadRequest

_MOST_CHARACTERS = 128  # of a token, on average; longer text cannot fit and is not tokenised at all
Message = Mapping[str, Any]  # role, content, and what else the template may look at


def chat_prompt(
    engine: Engine,
    messages: Sequence[Message],
    tools: Sequence[Any] = (),
    think: bool | None = None,
) -> list[int]:
    """Token ids that end where the assistant's answer begins.

    Raises TemplateError, BadRequest, PromptTooLong.
    """
    _check(engine, sum(len(str(message.get("content") or "")) for message in messages))
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
    """A prompt without a template; special tokens in it count. Raises BadRequest, PromptTooLong."""
    _check(engine, len(text))
    return engine.tokenizer.encode_text(text)


def _check(engine: Engine, characters: int) -> None:
    """An encoder-decoder has a source, which neither API has a field for.

    What is surely too long is not even cut into tokens: one takes some 150 bytes to be made.
    """
    if engine.reads_sources:
        raise BadRequest("the API does not serve encoder-decoders; `moeinf run` does")
    context = engine.placement.context
    if characters > _MOST_CHARACTERS * context:
        raise PromptTooLong(f"the prompt has {characters} characters, the context {context} tokens")
