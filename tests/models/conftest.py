"""Tiny models, made once per session."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import pytest
import torch
from torch import Tensor

from tests.fakes import Loaded, load_resident
from tests.tiny import TINY, save_tiny

TOKENS = 60


@dataclass
class Pair:
    """Our model, and what transformers says about one sequence of tokens."""

    ours: Loaded
    ids: list[int]
    logits: Tensor  # [TOKENS, vocab]

    def tolerance(self) -> float:
        return 1e-4 * float(self.logits.abs().max())

    def assert_close(self, actual: Tensor, start: int = 0) -> None:
        """actual [n, vocab] are the logits of the tokens from `start` on."""
        expected = self.logits[start : start + len(actual)]
        assert actual.shape == expected.shape
        assert actual.dtype == torch.float32
        worst = float((actual - expected).abs().max())
        assert worst <= self.tolerance(), f"{worst} > {self.tolerance()}"


@pytest.fixture(scope="session")
def make_pair(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Pair]:
    @cache
    def make(name: str) -> Pair:
        folder = tmp_path_factory.mktemp(name)
        reference = save_tiny(name, folder)
        ids = torch.randint(97, (1, TOKENS), generator=torch.Generator().manual_seed(7))
        with torch.no_grad():
            logits = reference(ids, use_cache=False).logits[0]
        return Pair(load_resident(folder), ids[0].tolist(), logits)

    return make


@pytest.fixture(params=list(TINY))
def pair(request: pytest.FixtureRequest, make_pair: Callable[[str], Pair]) -> Pair:
    return make_pair(request.param)
