"""List every exception class that the packages define, and those in the error tree."""

from __future__ import annotations

import importlib
import pkgutil
from functools import cache

import moeinf.cli
import moeinf.errors
import moeinf.models
import moeinf.offload
import moeinf.runtime
import moeinf.server
from moeinf.errors import MoeinfError

FLOORS = (
    moeinf.cli,
    moeinf.server,
    moeinf.runtime,
    moeinf.offload,
    moeinf.models,
    moeinf.errors,
)
# These import Ray, which only `pip install 'moeinf[cluster]'` brings. They define no exceptions.
WITH_RAY = frozenset(
    f"moeinf.server.cluster.{name}" for name in ("ingress", "launch", "request_router")
)


@cache
def exceptions() -> frozenset[type[BaseException]]:
    """Import every module, and return the exception classes that each defines."""
    found: set[type[BaseException]] = set()
    for package in FLOORS:
        names = [package.__name__]
        names += [i.name for i in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")]
        for name in set(names) - WITH_RAY:
            found |= {
                value
                for value in vars(importlib.import_module(name)).values()
                if isinstance(value, type)
                and issubclass(value, BaseException)
                and value.__module__ == name
            }
    return frozenset(found)


def in_tree() -> list[type[MoeinfError]]:
    """Return the tree's classes, by name."""
    found = [kind for kind in exceptions() if issubclass(kind, MoeinfError)]
    return sorted(found, key=lambda kind: kind.__name__)


def coded() -> list[type[MoeinfError]]:
    """Return the classes with a code: all but the root and the branches."""
    return [kind for kind in in_tree() if kind.code]
