"""The common part of peers on torch: two ways to talk to a model of transformers.

The peer's file loads the model and places its weights.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib.metadata import version
from typing import Any

import torch

from benchmarks.peers.base import Clock, Enough
from benchmarks.worker import forced_turn


def best_device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def versions(packages: Sequence[str]) -> dict[str, Any]:
    return {"version": ", ".join(f"{name} {version(name)}" for name in packages)}


def placed(model: Any) -> dict[str, Any]:
    """Return the number of pieces of a model per place in its device map.

    Empty when all pieces are on one device: transformers makes no map then.
    """
    places = getattr(model, "hf_device_map", {})
    return {"placed": Counter(str(place) for place in places.values())}


class CausalLm:
    """See worker.Runner: pass by pass. Conversations, all of one length, share one tensor."""

    def __init__(
        self, model: Any, device: str, packages: Sequence[str], more: Mapping[str, Any] = {}
    ) -> None:
        """Keep the model. more: further items for `about`."""
        self._model, self._device, self._packages, self._more = model, device, packages, more
        self.reset()

    def reset(self) -> None:
        self._past: Any = None

    def turn(
        self, prompts: list[list[int]], answers: list[list[int]], limit_s: float
    ) -> dict[str, Any]:
        return forced_turn(
            lambda: self._pass(prompts),
            lambda column: self._pass([[token] for token in column]),
            answers,
            limit_s,
        )

    def prefill(self, tokens: list[int]) -> float:
        start = time.perf_counter()
        self._pass([tokens])
        return time.perf_counter() - start

    def decode(self, tokens: list[int]) -> list[float]:
        return [self.prefill([token]) for token in tokens]

    def logits(self) -> list[float]:
        values: list[float] = self._logits[0].float().tolist()
        return values

    def about(self) -> dict[str, Any]:
        return {**versions(self._packages), **self._more}

    def _pass(self, rows: list[list[int]]) -> None:
        """Append rows [B][t] to the conversations and keep the logits of each last token."""
        with torch.inference_mode():
            found = self._model(
                torch.tensor(rows, device=self._device),
                past_key_values=self._past,
                use_cache=True,
                logits_to_keep=1,
            )
        self._past, self._logits = found.past_key_values, found.logits[:, -1].cpu()  # waits


class Generating:
    """See worker.Talker: by `generate(input_ids, **options)`, which returns prompts and answers.

    A turn passes whole conversations again: no KV cache is kept between calls.
    """

    def __init__(self, generate: Any, device: str, packages: Sequence[str]) -> None:
        self._generate, self._device, self._packages = generate, device, packages
        self.reset()

    def reset(self) -> None:
        self._said: list[list[int]] = []

    def turn(
        self, prompts: list[list[int]], answers: list[list[int]], limit_s: float
    ) -> dict[str, Any]:
        self._said = self._said or [[] for _ in prompts]
        rows = [said + prompt for said, prompt in zip(self._said, prompts, strict=True)]
        ids = torch.tensor(rows, device=self._device)
        clock = Clock(limit_s)
        with suppress(Enough), torch.no_grad():
            found = self._generate(
                ids,
                streamer=clock,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=len(answers[0]) + 1,
                min_new_tokens=len(answers[0]) + 1,
                do_sample=False,
            )
            rows = found.tolist()
        self._said = rows
        return clock.turn()

    def about(self) -> dict[str, Any]:
        return versions(self._packages)
