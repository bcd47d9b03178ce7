"""Import torch in two thirds of its time: leave out what only its compiler and exporter need.

Garbage collections during the import free nothing, and each looks at all that was imported before.
A custom operator of torch's notes the line that defines it. For that `inspect` would compare its
file with those of all imported modules; the line is found without them.
"""

from __future__ import annotations

import gc
import inspect
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import ModuleType

# Operators in Python for tensors without data. All that we use on such tensors are in C++; another
# one would be an error, never a wrong value. tests/cli/test_torch_finder.py looks at all families.
LEFT_OUT = ("torch._meta_registrations", "torch.distributed._meta_registrations")


class TorchFinder(MetaPathFinder):
    """Finds torch, and the parts of it that stay empty; all other modules are found as before."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of a module with a loader of this file, or None."""
        if fullname != "torch" and fullname not in LEFT_OUT:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and isinstance(spec.loader, SourceFileLoader):
            kind = _Uncollected if fullname == "torch" else _Empty
            spec.loader = kind(spec.loader.name, spec.loader.path)
        return spec


class _Uncollected(SourceFileLoader):
    """Runs a module without garbage collections; later ones do not look at what it made."""

    def exec_module(self, module: ModuleType) -> None:
        collects, search = gc.isenabled(), inspect.getmodule
        gc.disable()
        inspect.getmodule = lambda *_: None
        try:
            super().exec_module(module)
        finally:
            inspect.getmodule = search
            gc.freeze()
            if collects:
                gc.enable()


class _Empty(SourceFileLoader):
    """Runs nothing: the module stays empty."""

    def exec_module(self, module: ModuleType) -> None: ...


def install() -> None:
    """Import torch this way from now on; nothing changes if it is imported already."""
    sys.meta_path.insert(0, TorchFinder())
