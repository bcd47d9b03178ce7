"""Choose which cases of a matrix run by default, and name the families of cases."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence

_TABLES = {  # of tiny configurations, by the module that a collected test may have imported
    "tests.tiny_configs": ("TINY",),
    "tests.encoder_decoders": ("PAIRS",),
    "tests.exported": ("FAMILIES", "STREAMS"),
    "tests.runtime.gguf.writing.test_like_the_converter": ("EXPORTED",),
}


_OF_KERNELS = {"small": "full", "large": "interpreter"}  # selections in Triton's interpreter


def selection_of_kernel(size: str, gpu: bool) -> str | None:
    """Return the marker that leaves a kernel's test out by default; None: it runs.

    size: small or large, the time that Triton's interpreter takes. A GPU needs no interpreter.
    """
    return None if gpu else _OF_KERNELS[size]


def dist_of(asked: str, gpu: bool) -> str:
    """Return how xdist divides the tests: by file, or, where kernels compile for a GPU, one by one.

    One worker would compile all variants of a file, one after another.
    """
    return "worksteal" if gpu and asked == "loadfile" else asked


def chosen(cases: Sequence[Mapping[str, object]]) -> list[int]:
    """Return positions of cases that together have each value of each parameter.

    cases: each case's parameters by name. The choice is greedy: the next case is the one with the
    most values still missing. The first one wins a tie.
    """
    values = [{(name, repr(value)) for name, value in case.items()} for case in cases]
    missing = set().union(*values)
    positions = []
    while missing:
        best = max(range(len(cases)), key=lambda position: len(values[position] & missing))
        missing -= values[best]
        positions.append(best)
    return positions


def families_of(values: Iterable[object]) -> set[str]:
    """Return the families of tiny configurations among a case's parameters, by name or whole."""
    loaded = [
        (sys.modules[name], tables) for name, tables in _TABLES.items() if name in sys.modules
    ]
    known = [getattr(module, table) for module, tables in loaded for table in tables]
    found = set()
    for value in values:
        tinies = [table[value] for table in known if isinstance(value, str) and value in table]
        found |= {str(tiny.family) for tiny in tinies or [value] if hasattr(tiny, "config_class")}
    return found
