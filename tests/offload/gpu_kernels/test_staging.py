"""Test the pinned buffers with ordinary memory: what is packed, and when a half is used again."""

from __future__ import annotations

import pytest
import torch

from moeinf.offload.gpu_kernels import staging
from moeinf.offload.gpu_kernels.staging import Staging

CPU = torch.device("cpu")


class Mark:
    """A mark that notes its calls in `told`, with its number."""

    told: list[tuple[str, int]]
    count = 0

    def __init__(self) -> None:
        self.number, Mark.count = Mark.count, Mark.count + 1

    def record(self) -> None:
        Mark.told.append(("record", self.number))

    def synchronize(self) -> None:
        Mark.told.append(("wait", self.number))


@pytest.fixture
def made() -> tuple[Staging, list[int]]:
    """Return buffers and the sizes that they allocate."""
    Mark.told, Mark.count, sizes = [], 0, list[int]()

    def pinned(size_bytes: int) -> torch.Tensor:
        sizes.append(size_bytes)
        return torch.zeros(size_bytes, dtype=torch.uint8)

    return Staging(CPU, pinned, Mark), sizes


def test_tensors_of_several_types_go_up_and_down(made: tuple[Staging, list[int]]) -> None:
    buffers, sizes = made
    given = (torch.tensor([[3, -1]]), torch.randn(2, 5).bfloat16(), torch.arange(7).int())
    there = buffers.up(*given)
    assert there is not None
    waits = list[bool]()
    back = buffers.down(lambda: waits.append(True), *there)
    assert back is not None
    for x, up, down in zip(given, there, back, strict=True):
        assert torch.equal(x, up)
        assert torch.equal(x, down)
        assert x.dtype == down.dtype
    assert waits == [True]
    assert len(sizes) == 3  # two halves, and what comes down
    assert Mark.told == []


def test_what_came_down_stays(made: tuple[Staging, list[int]]) -> None:
    buffers, _ = made
    (first,) = buffers.down(lambda: None, torch.tensor([1, 2])) or ()
    buffers.down(lambda: None, torch.tensor([3, 4]))
    assert first.tolist() == [1, 2]


def test_a_half_is_written_again_after_its_copies(
    made: tuple[Staging, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staging, "_HALF_BYTES", 64)
    buffers, sizes = made
    kept = []
    for n in range(6):  # 32 bytes each: two in a half
        there = buffers.up(torch.full((4,), n))
        assert there is not None
        kept.append(there[0])
        assert there[0].tolist() == [n] * 4
    assert sizes == [64, 64]
    assert Mark.told == [("record", 0), ("wait", 1), ("record", 1), ("wait", 0)]
    assert [x[0].item() for x in kept] == [4, 5, 2, 3, 4, 5]  # on a CPU they are the buffer


def test_large_tensors_do_not_fit(made: tuple[Staging, list[int]]) -> None:
    buffers, sizes = made
    assert buffers.up(torch.zeros((1 << 20) + 1, dtype=torch.uint8)) is None
    assert buffers.down(lambda: None, torch.zeros((4 << 20) + 1, dtype=torch.uint8)) is None
    assert sizes == []
