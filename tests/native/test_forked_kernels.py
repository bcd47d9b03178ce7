"""A process that forks computes with threads of its own in the child."""

from __future__ import annotations

import os

import torch

from tests.native.test_kernels import linear, stored


def test_a_forked_child_computes_with_threads_of_its_own() -> None:
    data, _ = stored(torch.randn(640, 64, generator=torch.Generator().manual_seed(2)), "q4")
    x = torch.randn(1, 64, generator=torch.Generator().manual_seed(3))
    wanted = linear("q4", data, (640, 64), x)
    child = os.fork()
    if child == 0:
        os._exit(0 if torch.equal(linear("q4", data, (640, 64), x), wanted) else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert torch.equal(linear("q4", data, (640, 64), x), wanted)
