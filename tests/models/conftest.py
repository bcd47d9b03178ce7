"""Tiny models, made once per session."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.fakes import Loaded, load_resident
from tests.tiny import TINY, by_default, save_tiny

TOKENS = 60


@dataclass
class Pair:
    """Our model, and the logits of transformers for one sequence of tokens."""

    ours: Loaded
    ids: list[int]
    logits: Tensor  # [TOKENS, vocab]
    folder: Path  # of the checkpoint

    def tolerance(self) -> float:
        return 1e-4 * float(self.logits.abs().max())

    def assert_close(self, actual: Tensor, start: int = 0) -> None:
        """Compare actual [n, vocab], the logits of the tokens from `start` on."""
        expected = self.logits[start : start + len(actual)]
        assert actual.shape == expected.shape
        assert actual.dtype == torch.float32
        worst = float((actual - expected).abs().max())
        assert worst <= self.tolerance(), f"{worst} > {self.tolerance()}"


def typical(errors: list[Tensor]) -> float:
    """Return the root mean square over the 90 % of tokens with the smallest errors.

    If rounding moves a token to another expert, its error measures the difference of the experts,
    not the precision. Over many seeds this happens equally often on both sides.
    """
    per_token = torch.cat(errors).square().mean(-1).sort().values  # [tokens]
    return float(per_token[: len(per_token) * 9 // 10].mean().sqrt())


class LargestStorage(TorchDispatchMode):
    """Records the bytes of the largest storage of any result of a torch operation."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else (out,):
            if isinstance(tensor, Tensor):
                self.bytes = max(self.bytes, tensor.untyped_storage().nbytes())
        return out


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    """Use one thread: on a busy machine, tiny matmuls on several threads are 10 times slower."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def make_pair(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Pair]:
    @cache
    def make(name: str) -> Pair:
        folder = tmp_path_factory.mktemp(name)
        reference = save_tiny(name, folder)
        ids = torch.randint(97, (1, TOKENS), generator=torch.Generator().manual_seed(7))
        with torch.no_grad():
            logits = reference(ids, use_cache=False).logits[0]
        return Pair(load_resident(folder), ids[0].tolist(), logits, folder)

    return make


@pytest.fixture(params=by_default(list(TINY)))
def pair(request: pytest.FixtureRequest, make_pair: Callable[[str], Pair]) -> Pair:
    return make_pair(request.param)
