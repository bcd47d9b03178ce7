"""Simulate a torch device: tensors remember their device and must not be mixed.

Within `Strict()`, a tensor made on `PLACE`, or from such a tensor, counts as a device tensor. Its
bytes are in host memory. An operation on tensors from both sides raises torch's error. Each call
that makes the host wait for the device is counted. Errors that only a GPU would show therefore
appear here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

PLACE = torch.device("cuda", 0)
_CROSSES = {"copy_", "to", "cpu"}
_WAITS = {"item", "tolist", "__bool__", "__int__", "__float__", "__index__", "nonzero", "unique"}
_MARK = "_lies_there"


class Strict(TorchFunctionMode):
    """Torch mode that checks devices and counts waits.

    waits: how often the host waited for the device, by call name. During capture (`writing`)
    nothing may wait, and no tensor may cross between host and device. pinned: how many tensors were
    allocated in pinned memory.
    """

    writing: ClassVar = False

    def __init__(self) -> None:
        super().__init__()
        self.waits: Counter[str] = Counter()
        self.pinned = 0

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        named, name = dict(kwargs or {}), getattr(func, "__name__", "")
        self.pinned += bool(named.pop("pin_memory", False))
        if getattr(func, "__self__", None) is Tensor.device:
            return PLACE if lies_there(args[0]) else func(*args)
        if name in ("__get__", "size", "dim", "numel", "data_ptr", "__len__"):
            return _marked(func(*args, **named)) if lies_there(args[0]) else func(*args, **named)
        mine = args and isinstance(args[0], Tensor) and lies_there(args[0])
        if name in _CROSSES:
            return self._cross(func, name, args, named, bool(mine))
        wanted = named.get("device")
        there = wanted is not None and torch.device(wanted).type == PLACE.type
        if there:
            named["device"] = "cpu"
        given = [x for x in _tensors((args, named)) if x.dim() > 0]
        anywhere = {lies_there(x) for x in given}
        if name in ("__getitem__", "__setitem__") and mine:
            values = (x for x in _tensors(args[2:]) if x.dim() > 0)
            # indices may be on the host: torch copies them
            anywhere = {True, *map(lies_there, values)}
        if len(anywhere) > 1:
            raise RuntimeError(f"{name}: expected all tensors to be on the same device")
        there = there or True in anywhere or bool(mine)
        if there and name == "numpy":
            if not named.get("force"):
                raise TypeError("can't convert a device's tensor to numpy")
            self.waits[name] += 1
            return func(*args, **named)
        if there and name in _WAITS:
            assert not self.writing, name
            self.waits[name] += 1
        if there and name in ("tensor", "as_tensor", "from_numpy"):
            assert not self.writing, "the host's numbers are uploaded"
        if (
            there
            and name == "__getitem__"
            and any(x.dtype == torch.bool for x in _tensors(args[1:]) if x.dim() > 0)
        ):
            self.waits["a mask as index"] += 1
        found = func(*args, **named)
        if name == "__iter__":
            return iter([_marked(x) for x in found]) if there else found
        return _marked(found) if there else found

    def _cross(
        self, func: Callable[..., Any], name: str, args: tuple[Any, ...], named: dict[str, Any],
        mine: bool,
    ) -> Any:  # fmt: skip
        """Copy between host and device; the host waits for a copy to the host."""
        if name == "copy_":
            assert not self.writing or lies_there(args[1]) == mine, name
            if lies_there(args[1]) and not mine:
                self.waits[name] += 1
            return func(*args, **named)
        places = [x for x in (*args[1:], *named.values()) if isinstance(x, (str, torch.device))]
        there = mine if name == "to" else False
        if places:
            there = torch.device(places[0]).type == PLACE.type
        if there == mine:
            rest = [x for x in args[1:] if not isinstance(x, (str, torch.device))]
            named.pop("device", None)
            named.pop("non_blocking", None)
            found = func(args[0], *rest, **named) if rest or named else args[0]
            return _marked(found) if mine else found
        assert not self.writing, name
        if mine:
            self.waits[name] += 1
        moved = args[0].clone()
        setattr(moved, _MARK, there)
        return moved


def lies_there(x: Tensor) -> bool:
    return bool(getattr(x, _MARK, False))


def laid_there(x: Tensor) -> Tensor:
    """Mark x, a kernel's result, as a device tensor and return it."""
    setattr(x, _MARK, True)
    return x


def _marked(found: Any) -> Any:
    for x in _tensors(found):
        setattr(x, _MARK, True)
    return found


def _tensors(of: Any) -> Iterator[Tensor]:
    if isinstance(of, Tensor):
        yield of
    elif isinstance(of, dict):
        yield from _tensors(list(of.values()))
    elif isinstance(of, (list, tuple)):
        for one in of:
            yield from _tensors(one)
