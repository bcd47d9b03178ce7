"""Test embeddings: their values, the three endpoints, and their refusals."""

from __future__ import annotations

from collections.abc import Callable

import httpx
import numpy as np
import ollama
import openai
import pytest
import torch

from moeinf.runtime.config import PREFILL_CHUNK

LONG = " ".join(f"{number} plus {number}" for number in range(40))  # more than one prefill chunk


def cosine(a: list[float], b: list[float]) -> float:
    return float(np.dot(a, b))


def test_it_is_the_mean_of_the_last_states(
    ollama_client: ollama.Client, open_engine: Callable[..., object]
) -> None:
    engine = open_engine()
    ids = engine.tokenizer.encode_text(LONG, plain=True)  # type: ignore[attr-defined]
    assert len(ids) > PREFILL_CHUNK
    state = engine.new_state()  # type: ignore[attr-defined]
    chunks = [ids[at : at + PREFILL_CHUNK] for at in range(0, len(ids), PREFILL_CHUNK)]
    states = [engine.states(state, chunk) for chunk in chunks]  # type: ignore[attr-defined]
    mean = np.concatenate(states).mean(axis=0, dtype=np.float64)
    found = ollama_client.embed("demo", LONG)
    assert found.prompt_eval_count == len(ids)
    np.testing.assert_allclose(found.embeddings[0], mean / np.linalg.norm(mean), atol=1e-6)


def test_the_states_are_what_the_head_reads(open_engine: Callable[..., object]) -> None:
    """The logits of the last token are the product of the head and the last state."""
    engine = open_engine()
    ids = engine.tokenizer.encode_text("17+25=")  # type: ignore[attr-defined]
    states = engine.states(engine.new_state(), ids)  # type: ignore[attr-defined]
    logits = engine.extend(engine.new_state(), ids)  # type: ignore[attr-defined]
    head = engine.model.body.head(torch.from_numpy(states[-1:]).bfloat16())  # type: ignore[attr-defined]
    np.testing.assert_array_equal(head[0].float().numpy(), logits)


def test_the_three_wordings_agree(
    address: str, ollama_client: ollama.Client, openai_client: openai.OpenAI
) -> None:
    texts = ["sort owl, fig", "spell tree", "sort fig, owl"]
    vectors = ollama_client.embed("demo", texts).embeddings
    create = openai_client.embeddings.create
    answer = create(model="demo", input=texts)  # the client requests base64 and decodes it
    plain = create(model="demo", input=texts[1], encoding_format="float")
    assert [one.index for one in answer.data] == [0, 1, 2]
    np.testing.assert_allclose([one.embedding for one in answer.data], vectors, atol=1e-7)
    np.testing.assert_allclose(plain.data[0].embedding, vectors[1], atol=1e-7)
    assert answer.usage.prompt_tokens == answer.usage.total_tokens > 0
    old = httpx.post(f"{address}/api/embeddings", json={"model": "demo", "prompt": texts[0]})
    np.testing.assert_allclose(old.json()["embedding"], vectors[0], atol=1e-7)
    assert all(abs(cosine(list(v), list(v)) - 1) < 1e-5 for v in vectors)
    near, far = cosine(*(list(vectors[i]) for i in (0, 2))), cosine(*map(list, vectors[:2]))
    assert near > far


def test_what_is_refused_and_what_is_cut(address: str) -> None:
    def ask(path: str, **body: object) -> httpx.Response:
        return httpx.post(f"{address}{path}", json={"model": "demo", **body}, timeout=60)

    long = "x" * 4000
    assert ask("/api/embed", input=long, truncate=False).status_code == 400
    assert len(ask("/api/embed", input=long).json()["embeddings"][0]) == 128
    assert ask("/v1/embeddings", input=long).status_code == 400
    assert ask("/v1/embeddings", input=[1 << 30]).status_code == 400
    assert ask("/v1/embeddings", input=[]).status_code == 400
    assert ask("/v1/embeddings", input="").status_code == 400
    for path in ("/v1/embeddings", "/api/embed"):
        assert ask(path, input="x", dimensions=8).status_code == 400
        assert ask(path, input="x", dimensions=128).status_code == 200
    assert ask("/v1/embeddings", input=[[3, 4], [5]]).json()["usage"]["prompt_tokens"] == 3
    assert ask("/api/embed", input=[]).json()["embeddings"] == []
    assert ask("/api/embed", input="x", options={"foo": 1}).status_code == 200
    assert ask("/api/embed", input="x", options={"temperature": -1}).status_code == 400


@pytest.mark.parametrize("path", ["/api/embed", "/v1/embeddings"])
def test_an_unknown_model(path: str, address: str) -> None:
    answer = httpx.post(f"{address}{path}", json={"model": "nothing", "input": "x"})
    assert answer.status_code == 404
