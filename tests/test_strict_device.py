"""The strict device: the mixes it must refuse and the waits it must count."""

from __future__ import annotations

import pytest
import torch

from tests.strict_device import PLACE, Strict, lies_there


def test_sides_do_not_meet() -> None:
    with Strict() as strict:
        here, there = torch.ones(3), torch.ones(3, device=PLACE)
        for meet in (
            lambda: here + there, lambda: torch.cat((there, here)), lambda: there.add_(here),
            lambda: torch.where(there > 0, there, here), lambda: here[there.long()],
            lambda: there.__setitem__(0, here), lambda: there.numpy(),
        ):  # fmt: skip
            with pytest.raises((RuntimeError, TypeError), match=r"same device|can't convert"):
                meet()
        assert there.device == PLACE
        assert here.device.type == "cpu"
        assert not strict.waits
        assert there.numpy(force=True).tolist() == [1, 1, 1]
        assert there.sum().item() == 3
        assert strict.waits == {"numpy": 1, "item": 1}


def test_what_comes_of_a_tensor_lies_where_it_lies() -> None:
    with Strict() as strict:
        there = torch.arange(6, device=PLACE).view(2, 3)
        found = (
            there.T, there[0], there.split(1)[1], there.float().softmax(-1), there.new_zeros(2),
            torch.zeros_like(there), there.max(-1).values, next(iter(there)), there * 2,
        )  # fmt: skip
        assert all(map(lies_there, found))
        down = there.cpu()
        assert not lies_there(down)
        assert lies_there(down.to(PLACE))
        here = torch.zeros(2, 3, dtype=torch.int64)
        here.copy_(there)
        assert torch.equal(here, down)
        assert strict.waits == {"cpu": 1, "copy_": 1}
