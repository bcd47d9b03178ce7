"""A real shape with random weights that routes as a real model did on recorded requests.

Every recorded token becomes a word of the vocabulary. Embeddings are random rows, and so large that
the layers hardly turn the residual stream. Each layer's router is then the solution of a linear
system: the normed embedding of word w gives the recorded experts of w a logit of _LOGIT, and the
others 0. Every program that reads the weights routes a text of these words as the recorded model
did, without a change to the program.

The stream hardly turns, so the next layer's router would foretell every choice. Real ones foretell
72 to 89 %. So the norm before each router has some weights of -1 in places of its own, which the
router undoes and the router of the next layer does not.

The system can be solved for fewer words than the hidden size. So a model knows the first recorded
answers and prompts only; `text` begins again after the last one. A shape takes the number of
experts and of experts per token from the recording. Its layers take the recording's in order, from
the first again when it has more.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks.calibrated import EMBEDDING, Calibration, bfloat16, calibrated, tokens
from benchmarks.models import RaceModel, check_space
from benchmarks.shapes import EXPERTS, Config, tensors_of
from moeinf.offload.routing.requests_file import RecordedRequests, read_requests

ROUTINGS = ("deepseek-v2-lite", "gpt-oss-20b", "calibrated")
_TRACES = Path(__file__).parents[1] / "tests/data/traces"
_SOLVABLE = 0.75  # words ÷ hidden size; nearer 1, a router's errors grow
_ANSWERS = 0.7  # the share of words that are answers; the others are prompts
_SCALE = 32.0  # root mean square of an embedding; all layers together add about 5
_LOGIT = 4.0
_FLIPPED = 0.042  # the share of a norm's weights that are -1, fitted to a recall of hints of 80 %
_ROWS = 4096  # embedded at a time


@dataclass(frozen=True)
class Words:
    """The words of a recording: `answers` words of answers, then those of prompts.

    ids [W, L, K]. starts: the first word of each request's answer.
    """

    ids: NDArray[np.unsignedinteger]
    answers: int
    starts: list[int]


@cache
def recorded(routing: str) -> RecordedRequests:
    return read_requests(_TRACES / f"{routing}.npz")


@cache
def words(routing: str, hidden: int) -> Words:
    """Choose the words that a model of this hidden size can route."""
    most = int(_SOLVABLE * hidden)
    answers, starts = int(_ANSWERS * most), list[int]()
    parts, prompts, count = [], [], 0
    for request in recorded(routing).requests:
        if count < answers:
            starts.append(count)
            parts.append(request.decode_ids[: answers - count])
            count += len(parts[-1])
            prompts.append(request.prompt_ids)
        else:  # a recording may be without prompts: then later answers replace them
            prompts.append(request.decode_ids)
    others = np.concatenate(prompts)[: most - count]
    return Words(np.concatenate([*parts, others]), count, starts)


def fitted(config: Config, routing: str) -> Config:
    """Return the config with the recording's number of experts and of experts per token."""
    if routing == "calibrated":
        return config
    found = recorded(routing)
    experts = next(key for key in EXPERTS if key in config)
    return config | {experts: found.experts, "num_experts_per_tok": found.top_k}


def name_of(name: str, routing: str) -> str:
    """Return the name of a shape's model in a cache."""
    return f"{name}-{Calibration().name if routing == 'calibrated' else routing}"


def routed(cache_folder: Path, name: str, config: Config, routing: str) -> RaceModel:
    """Return the model of `config` with this routing; write its tensors if they are absent."""
    if routing == "calibrated":
        return calibrated(cache_folder, name, config, Calibration())
    config, name = fitted(config, routing), name_of(name, routing)
    folder = cache_folder / "given" / name
    routers = [tensor for tensor, _ in tensors_of(config) if tensor.endswith(".gate.weight")]
    norms = [
        f"{'.'.join(router.split('.')[:3])}.post_attention_layernorm.weight" for router in routers
    ]
    given = {tensor: folder / f"{tensor}.bin" for tensor in (EMBEDDING, *norms, *routers)}
    if not all(path.exists() for path in given.values()):
        vocab, hidden = config["vocab_size"], config["hidden_size"]
        folder.mkdir(parents=True, exist_ok=True)
        check_space(folder, 2 * vocab * hidden)
        rows = embeddings(routing, hidden)
        made = _routers(routing, rows, len(routers))
        for norm, tensor, (signs, router) in zip(norms, routers, made, strict=True):
            bfloat16(signs).tofile(given[norm])
            bfloat16(router).tofile(given[tensor])
        with given[EMBEDDING].with_suffix(".partial").open("wb") as file:
            for first in range(0, vocab, _ROWS):
                chosen = np.arange(first, min(first + _ROWS, vocab)) % len(rows)
                bfloat16(rows[chosen]).tofile(file)
        given[EMBEDDING].with_suffix(".partial").rename(given[EMBEDDING])
    return RaceModel(cache_folder, name, config, given)


def embeddings(routing: str, hidden: int) -> NDArray[np.float32]:
    """Return the rows [W, hidden] of the words, rounded to bfloat16."""
    random = np.random.default_rng(0)
    count = len(words(routing, hidden).ids)
    rows = random.standard_normal((count, hidden), np.float32) * np.float32(_SCALE)
    return (bfloat16(rows).astype(np.uint32) << 16).view(np.float32)


def _routers(
    routing: str, rows: NDArray[np.float32], layers: int
) -> list[tuple[NDArray[np.float32], NDArray[np.float32]]]:
    """Return each layer's norm [hidden] and router [E, hidden].

    The router is the smallest one with the wanted logits.
    """
    random = np.random.default_rng(1)
    normed = rows.astype(np.float64)
    normed /= np.sqrt((normed**2).mean(1, keepdims=True))
    inverse = np.linalg.solve(normed @ normed.T, normed)  # [W, hidden]
    ids = words(routing, rows.shape[1]).ids
    routers = []
    for layer in range(layers):
        wanted = np.zeros((len(ids), recorded(routing).experts))
        np.put_along_axis(wanted, ids[:, layer % ids.shape[1]].astype(np.int64), _LOGIT, 1)
        signs = np.where(random.random(rows.shape[1]) < _FLIPPED, -1, 1).astype(np.float32)
        routers.append((signs, (wanted.T @ inverse).astype(np.float32) * signs))
    return routers


def text(routing: str, config: Config, length: int, prompt: int, seed: int = 0) -> list[int]:
    """Return `length` token ids of a recorded conversation; the first `prompt` are its prompt.

    The answer begins with that of request `seed` and goes on with those after it.
    """
    if routing == "calibrated":
        return tokens(Calibration(), config["vocab_size"], length, seed)
    known = words(routing, config["hidden_size"])
    start, count = known.starts[seed % len(known.starts)], len(known.ids) - known.answers
    first = [known.answers + (start + place) % count for place in range(prompt)]
    return first + [(start + place) % known.answers for place in range(length - prompt)]
