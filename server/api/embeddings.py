"""Embeddings, by both APIs: the mean over a text's tokens of the last layer's states, at length 1.

The states are those after the final norm and before the head. A text's own tokens count, and no
template is put around it.
"""

from __future__ import annotations

import base64
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import aclosing
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from fastapi import APIRouter, Request, Response
from fastapi.responses import StreamingResponse
from pydantic import Field

from moeinf.runtime.config import parse_duration
from moeinf.runtime.generation.events import Ended, Failed, Vector
from moeinf.runtime.requests import Limits, SamplingOptions
from moeinf.server.api.answers import BadRequest, events
from moeinf.server.api.fields.bounds import Inputs, Tokens
from moeinf.server.api.fields.optional import RequestObject
from moeinf.server.api.fields.other import Lenient
from moeinf.server.api.ollama_options import read_options
from moeinf.server.api.prompts import embedding_prompt
from moeinf.server.engines.jobs import Job
from moeinf.server.engines.model_manager import Loaded, ModelManager
from moeinf.server.http.bodies import JsonRoute
from moeinf.server.http.json_text import dump
from moeinf.server.http.request_log import notes_of

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

router = APIRouter(route_class=JsonRoute)
_Input = str | list[int]
_Vector: TypeAlias = "NDArray[np.float32]"


class OllamaRequest(RequestObject):
    model: str
    input: str | Inputs[str]
    truncate: bool = True
    options: dict[str, Any] = Field(default_factory=dict)
    keep_alive: str | int | float | None = None
    dimensions: int | None = None


class OldOllamaRequest(RequestObject):
    model: str
    prompt: str
    options: dict[str, Any] = Field(default_factory=dict)
    keep_alive: str | int | float | None = None


class OpenAIRequest(Lenient):
    model: str
    input: str | Inputs[str] | Tokens | Inputs[Tokens]
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = None


@router.post("/api/embed")
async def embed(asked: OllamaRequest, request: Request) -> Response:
    start = time.perf_counter()
    loaded, limits = await _model(asked, request)
    load_seconds = time.perf_counter() - start
    inputs = [asked.input] if isinstance(asked.input, str) else asked.input
    vectors, tokens = await _vectors(loaded, request, inputs, asked.truncate, limits)
    about = {
        "model": asked.model,
        "total_duration": round((time.perf_counter() - start) * 1e9),
        "load_duration": round(load_seconds * 1e9),
        "prompt_eval_count": tokens,
    }
    return _answer(about, "embeddings", (vector.tolist() for vector in vectors))


@router.post("/api/embeddings")
async def embed_as_before(asked: OldOllamaRequest, request: Request) -> dict[str, Any]:
    """Return the vector of one text, as Ollama did before /api/embed."""
    loaded, limits = await _model(asked, request)
    if not asked.prompt:  # only loads the model
        return {"embedding": []}
    vectors, _ = await _vectors(loaded, request, [asked.prompt], True, limits)
    return {"embedding": vectors[0].tolist() if vectors else []}


@router.post("/v1/embeddings")
async def embed_for_openai(asked: OpenAIRequest, request: Request) -> Response:
    asked.check_others(request)
    host: ModelManager = request.app.state.host
    inputs = _listed(asked.input)
    loaded = await host.model(asked.model)
    _check_length(loaded, asked.dimensions)
    vectors, tokens = await _vectors(loaded, request, inputs, False, Limits(0))

    def worded(vector: _Vector) -> list[float] | str:
        if asked.encoding_format == "float":
            numbers: list[float] = vector.tolist()
            return numbers
        return base64.b64encode(vector.astype("<f4").tobytes()).decode()

    data = (
        {"object": "embedding", "index": index, "embedding": worded(vector)}
        for index, vector in enumerate(vectors)
    )
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    return _answer({"object": "list", "model": asked.model, "usage": usage}, "data", data)


def _answer(about: dict[str, Any], name: str, items: Iterable[Any]) -> Response:
    """Return a document whose list is written item by item.

    A number takes 20 bytes as text, 32 as an object of Python, 4 in a vector.
    """

    async def parts() -> AsyncIterator[str]:
        before = f'{dump(about)[:-1]}, "{name}": ['
        for item in items:
            yield before + dump(item)
            before = ", "
        yield ("" if before == ", " else before) + "]}"

    return StreamingResponse(parts(), media_type="application/json")


async def _model(
    asked: OllamaRequest | OldOllamaRequest, request: Request
) -> tuple[Loaded, Limits]:
    """Load the model; return it and the limits of a job.

    Options of generation have no effect, but invalid ones fail.
    """
    host: ModelManager = request.app.state.host
    context = read_options(asked.options).limits.context
    notes_of(request).ignore(asked.options)
    keep_alive = None if asked.keep_alive is None else parse_duration(asked.keep_alive)
    loaded = await host.model(asked.model, keep_alive, context)
    if isinstance(asked, OllamaRequest):
        _check_length(loaded, asked.dimensions)
    return loaded, Limits(0, context=context)


def _check_length(loaded: Loaded, dimensions: int | None) -> None:
    """Raise BadRequest for another vector length than that of the model."""
    if dimensions not in (None, loaded.manifest.hidden_width):
        expected = f"expected {loaded.manifest.hidden_width}, the length of this model's vectors"
        raise BadRequest(f"dimensions: {dimensions} is invalid ({expected})", "dimensions")


def _listed(given: str | list[str] | list[int] | list[list[int]]) -> list[_Input]:
    """Return OpenAI's four forms of input as one: texts or token ids."""
    if isinstance(given, str):
        return [given]
    ids = [item for item in given if isinstance(item, int)]
    if ids:
        return [ids]
    inputs = [item for item in given if not isinstance(item, int)]
    if not inputs:
        raise BadRequest("input is empty")
    return inputs


async def _vectors(
    loaded: Loaded, request: Request, inputs: Sequence[_Input], truncate: bool, limits: Limits
) -> tuple[list[_Vector], int]:
    """Return a vector per input, in order, and the total number of tokens.

    Raises PromptTooLong unless `truncate`, which keeps the beginning. Ends early when the client
    has gone.
    """
    vectors: list[_Vector] = []
    tokens = 0
    with loaded.used():
        for item in inputs:
            prepare = partial(embedding_prompt, given=item, truncate=truncate, limits=limits)
            job = Job(prepare, SamplingOptions(), limits, lambda _: None, embed=True)
            async with aclosing(events(loaded, job, request)) as answer:
                async for event in answer:
                    if isinstance(event, Failed):
                        raise event.error
                    if isinstance(event, Vector):
                        vectors.append(event.values)
                    if isinstance(event, Ended):
                        tokens += event.prompt_tokens
                        if event.reason == "cancelled":
                            return vectors, tokens
    return vectors, tokens
