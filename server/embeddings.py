"""Embeddings, by both APIs: the mean over a text's tokens of the last layer's states, at length 1.

Does not know how states are computed. The states are those after the final norm and before the
head; a text's own tokens count, and no template is put around it.
"""

from __future__ import annotations

import base64
import struct
import time
from collections.abc import Sequence
from contextlib import aclosing
from functools import partial
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request
from pydantic import ConfigDict, Field

from moeinf.runtime.asking import Limits, SamplingOptions
from moeinf.runtime.config import parse_duration
from moeinf.server.answers import BadRequest, events
from moeinf.server.host import Host, Loaded
from moeinf.server.jobs import Ended, Failed, Job, Vector
from moeinf.server.nulls import Said
from moeinf.server.ollama_api import sampling
from moeinf.server.prompts import embedding_prompt

router = APIRouter()
_MOST_INPUTS = 2048  # of one request, as OpenAI has it
_Token = Annotated[int, Field(ge=0)]
_Input = str | list[_Token]


class OllamaRequest(Said):
    model: str
    input: str | Annotated[list[str], Field(max_length=_MOST_INPUTS)]
    truncate: bool = True
    options: dict[str, Any] = Field(default_factory=dict)
    keep_alive: str | int | float | None = None
    dimensions: int | None = None


class OldOllamaRequest(Said):
    model: str
    prompt: str
    options: dict[str, Any] = Field(default_factory=dict)
    keep_alive: str | int | float | None = None


class OpenAIRequest(Said):
    model_config = ConfigDict(extra="forbid")
    model: str
    input: str | list[str] | list[_Token] | list[list[_Token]]
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = None
    user: str | None = None


@router.post("/api/embed")
async def embed(asked: OllamaRequest, request: Request) -> dict[str, Any]:
    start = time.perf_counter()
    loaded = await _model(asked, request)
    load_seconds = time.perf_counter() - start
    inputs = [asked.input] if isinstance(asked.input, str) else asked.input
    vectors, tokens = await _vectors(loaded, request, inputs, asked.truncate)
    return {
        "model": asked.model,
        "embeddings": vectors,
        "total_duration": round((time.perf_counter() - start) * 1e9),
        "load_duration": round(load_seconds * 1e9),
        "prompt_eval_count": tokens,
    }


@router.post("/api/embeddings")
async def embed_as_before(asked: OldOllamaRequest, request: Request) -> dict[str, Any]:
    """What Ollama had before /api/embed: one text, and its vector alone."""
    loaded = await _model(asked, request)
    if not asked.prompt:  # only loads
        return {"embedding": []}
    vectors, _ = await _vectors(loaded, request, [asked.prompt], truncate=True)
    return {"embedding": vectors[0] if vectors else []}


@router.post("/v1/embeddings")
async def embed_for_openai(asked: OpenAIRequest, request: Request) -> dict[str, Any]:
    if asked.dimensions is not None:
        raise BadRequest("dimensions: models here have one length of vector")
    host: Host = request.app.state.host
    inputs = _listed(asked.input)
    loaded = await host.model(asked.model)
    vectors, tokens = await _vectors(loaded, request, inputs, truncate=False)

    def worded(vector: list[float]) -> list[float] | str:
        if asked.encoding_format == "float":
            return vector
        return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()

    data = [
        {"object": "embedding", "index": index, "embedding": worded(vector)}
        for index, vector in enumerate(vectors)
    ]
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    return {"object": "list", "data": data, "model": asked.model, "usage": usage}


async def _model(asked: OllamaRequest | OldOllamaRequest, request: Request) -> Loaded:
    """Options are those of generation: known ones have no effect, unknown ones are refused."""
    host: Host = request.app.state.host
    sampling(asked.options)
    if isinstance(asked, OllamaRequest) and asked.dimensions is not None:
        raise BadRequest("dimensions: models here have one length of vector")
    keep_alive = None if asked.keep_alive is None else parse_duration(asked.keep_alive)
    return await host.model(asked.model, keep_alive)


def _listed(given: str | list[str] | list[int] | list[list[int]]) -> list[_Input]:
    """OpenAI's four forms of input as one: texts or token ids."""
    if isinstance(given, str):
        return [given]
    ids = [item for item in given if isinstance(item, int)]
    if ids:
        return [ids]
    inputs = [item for item in given if not isinstance(item, int)]
    if not 0 < len(inputs) <= _MOST_INPUTS:
        raise BadRequest(f"input has {len(inputs)} texts, of 1 to {_MOST_INPUTS}")
    return inputs


async def _vectors(
    loaded: Loaded, request: Request, inputs: Sequence[_Input], truncate: bool
) -> tuple[list[list[float]], int]:
    """A vector per input, one input after the other, and how many tokens they had together.

    Raises PromptTooLong unless `truncate`, which keeps the beginning. Ends early when the client
    has gone: nobody reads the rest.
    """
    vectors: list[list[float]] = []
    tokens = 0
    with loaded.used():
        for item in inputs:
            prepare = partial(embedding_prompt, given=item, truncate=truncate)
            job = Job(prepare, SamplingOptions(), Limits(0), lambda _: None, embed=True)
            async with aclosing(events(loaded, job, request)) as answer:
                async for event in answer:
                    if isinstance(event, Failed):
                        raise event.error
                    if isinstance(event, Vector):
                        vectors.append(event.values.tolist())
                    if isinstance(event, Ended):
                        tokens += event.prompt_tokens
                        if event.reason == "cancelled":
                            return vectors, tokens
    return vectors, tokens
