"""Check the pickle of a state dict before torch reads it.

A few bytes of another pickle can build gigabytes: `bytearray(3_000_000_000)`, or a list that is
copied again and again. Two linear passes allow what torch.save writes for a state dict alone: the
first looks at opcodes, the second calls stand-ins in the place of functions.
"""

from __future__ import annotations

import io
import pickle
import pickletools
import re
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

_OPCODES = frozenset(
    "PROTO STOP MARK GLOBAL REDUCE BUILD BINPERSID EMPTY_DICT SETITEM SETITEMS EMPTY_LIST APPEND"
    " APPENDS EMPTY_TUPLE TUPLE TUPLE1 TUPLE2 TUPLE3 NONE NEWTRUE NEWFALSE BININT BININT1 BININT2"
    " LONG1 BINUNICODE BINPUT LONG_BINPUT BINGET LONG_BINGET".split()
)
_STORAGE = re.compile(r"\w{1,20}Storage")
_MOST_OPCODES = 4 << 20  # a tensor needs some 30
_MOST_CALLS = 1 << 17  # a tensor needs 2
_MOST_BUILDS = 1  # the attributes of the state dict
_MOST_TEXT = 1 << 12  # characters of a name
_MOST_SIDES = 8
_MOST_INTEGER = 1 << 63


def check_pickle(data: bytes) -> None:
    """Raise UnpicklingError, or what an invalid pickle raises, unless it is of a state dict."""
    _check_opcodes(data)
    _StandIns(io.BytesIO(data)).load()


def _check_opcodes(data: bytes) -> None:
    left = {"REDUCE": _MOST_CALLS, "BUILD": _MOST_BUILDS}
    argument: Any
    for number, (opcode, argument, _) in enumerate(pickletools.genops(data)):
        name = opcode.name
        if name not in _OPCODES:
            raise pickle.UnpicklingError(f"{name} {str(argument)[:80]}")
        if name in left:
            left[name] -= 1
        unused = name.endswith("BINPUT") and argument > number  # the memo would have a hole
        long = name == "BINUNICODE" and len(argument) > _MOST_TEXT
        if unused or long or (name == "LONG1" and abs(argument) >= _MOST_INTEGER):
            raise pickle.UnpicklingError(f"{name} with an argument that is too large")
        if number > _MOST_OPCODES or min(left.values()) < 0:
            raise pickle.UnpicklingError("too many values")


class _StandIns(pickle.Unpickler):
    """An unpickler whose functions check their arguments and build nothing."""

    def find_class(self, module: str, name: str) -> Callable[..., Any]:
        if (module, name) in _FUNCTIONS:
            return _FUNCTIONS[module, name]
        if module == "torch" and _STORAGE.fullmatch(name):
            return _never
        raise pickle.UnpicklingError(f"{module}.{name}"[:80])

    def persistent_load(self, pid: Any) -> None:
        if type(pid) is not tuple or len(pid) != 5:
            raise pickle.UnpicklingError("a reference that names no storage")


def _never(*_: object) -> None:
    raise pickle.UnpicklingError("a call of a storage")


def _dict() -> OrderedDict[Any, Any]:
    return OrderedDict()


def _tensor(
    storage: object, offset: object, size: Any, stride: Any, grad: object, hooks: object
) -> None:
    for sides in (size, stride):
        if type(sides) is not tuple or len(sides) > _MOST_SIDES:
            raise pickle.UnpicklingError("a tensor of an invalid shape")


def _parameter(data: object, grad: object, hooks: object) -> None:
    """Take what torch takes."""


_FUNCTIONS: dict[tuple[str, str], Callable[..., Any]] = {
    ("collections", "OrderedDict"): _dict,
    ("torch._utils", "_rebuild_tensor_v2"): _tensor,
    ("torch._utils", "_rebuild_parameter"): _parameter,
}
