"""Find the version of moeinf."""

from __future__ import annotations

import importlib.metadata


def version() -> str:
    """Return the installed version, or "source" if the package is not installed."""
    try:
        return importlib.metadata.version("moeinf")
    except importlib.metadata.PackageNotFoundError:
        return "source"
