"""Test hints: the next layer's router on this layer's hidden state, given only on request."""

from __future__ import annotations

import json

import torch
from torch import Tensor

from moeinf.models.layers.moe import SparseFfn
from moeinf.models.layers.routing import HashRouter
from moeinf.runtime.library.library import DEMO_CHECKPOINT
from moeinf.runtime.text.tokenizer import Tokenizer
from tests.fakes import Loaded, WatchedExperts, load_resident
from tests.models.conftest import Pair


def sparse(loaded: Loaded) -> list[SparseFfn]:
    blocks = loaded.model.body.blocks  # type: ignore[attr-defined]
    found = [getattr(block, "ffn", None) for block in blocks]
    return [ffn for ffn in found if isinstance(ffn, SparseFfn)]


def test_hints_come_from_the_next_router_and_change_nothing(pair: Pair) -> None:
    """Every family; DeepSeek's layers are counted without the dense ones before them."""
    silent, asking = WatchedExperts(pair.ours.experts), WatchedExperts(pair.ours.experts)
    asking.wants_hints = True
    model = pair.ours.model
    states = [model.new_state(64), model.new_state(64)]
    for experts, state in zip((silent, asking), states, strict=True):
        prefill = model.extend([(pair.ids[:20], state)], experts, "all")
        decode = model.extend([(pair.ids[20:21], state)], experts)
        if experts is silent:
            expected = (prefill, decode)
    assert (prefill == expected[0]).all()
    assert (decode == expected[1]).all()
    ffns = sparse(pair.ours)
    for seen, tokens in zip(asking.passes, (pair.ids[:20], pair.ids[20:21]), strict=True):
        assert list(seen.hints) == list(range(1, model.moe.layers))
        for layer, hint in seen.hints.items():
            if model.moe.width:
                continue  # the experts see a projection of the routers' input
            router = ffns[layer].router
            if isinstance(router, HashRouter):  # the hint is exact
                assert (hint == router.table[tokens]).all()
                continue
            x, before = seen.inputs[layer - 1], ffns[layer - 1].before
            if before is not None:  # only the experts' input is normed, and routers norm it again
                x = x / before.weight  # type: ignore[attr-defined]
            with torch.inference_mode():
                ids, _ = router(x)
            assert (hint == ids).all()
    assert all(seen.hints == {} for seen in silent.passes)


def test_the_right_router_by_hand() -> None:
    """Layer n's router sends a token to the expert that x · (n + 1) points at."""

    def router(n: int) -> object:
        def route(x: Tensor) -> tuple[Tensor, Tensor]:
            return (x[:, :1] * (n + 1)).long(), torch.ones(len(x), 1)

        return route

    class Listener:
        wants_hints = True

        def __init__(self) -> None:
            self.heard: list[tuple[int, list[list[int]]]] = []

        def submit(self, layer: int, x: Tensor, ids: Tensor, weights: Tensor) -> Listener:
            self.heard.append((layer, ids.tolist()))
            self.x = x
            return self

        def result(self) -> Tensor:
            return self.x + 1

        def hint(self, layer: int, ids: Tensor, scores: Tensor) -> None:
            self.heard.append((layer, ids.tolist()))

    listener = Listener()
    ffn = SparseFfn(3, router(3), ahead=router(4))  # type: ignore[arg-type]
    ffn(torch.tensor([[1.0], [2.0]]), listener)  # type: ignore[arg-type]
    assert listener.heard == [(4, [[5], [10]]), (3, [[4], [8]])]


def test_hints_of_the_demo_find_most_experts() -> None:
    """Chance finds 4 of 32; predicting the experts of the previous token finds fewer than hints."""
    demo, tokenizer = load_resident(DEMO_CHECKPOINT), Tokenizer(DEMO_CHECKPOINT)
    experts = WatchedExperts(demo.experts)
    experts.wants_hints = True
    lines = (DEMO_CHECKPOINT / "heldout.jsonl").read_text().splitlines()[::60]
    for line in lines:
        item = json.loads(line)
        ids = tokenizer.encode_text(item["prompt"] + item["answer"])
        demo.model.extend([(ids, demo.model.new_state(512))], experts)
    found = repeated = total = 0
    for seen in experts.passes:
        for layer, hint in seen.hints.items():
            ids = seen.routed[layer]
            found += int((hint[:, :, None] == ids[:, None, :]).sum())
            repeated += int((ids[:-1, :, None] == ids[1:, None, :]).sum())
            total += ids.numel()
    assert 0.6 < found / total < 0.9
    assert repeated / total + 0.1 < found / total


def test_rows_name_their_request(pair: Pair) -> None:
    model, experts = pair.ours.model, WatchedExperts(pair.ours.experts)
    a, b = model.new_state(9), model.new_state(9)
    a.request, b.request = 70, 3
    model.extend([([1, 2], a), ([3], b)], experts)
    assert experts.passes[-1].rows == [70, 70, 3]
    assert a.snapshot().request == 70
