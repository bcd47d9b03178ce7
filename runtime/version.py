"""Find the version of moeinf."""

from __future__ import annotations


def version() -> str:
    """Return the installed version, or "source" if the package is not installed."""
    import importlib.metadata  # 10 ms, which most commands do without

    try:
        return importlib.metadata.version("moeinf")
    except importlib.metadata.PackageNotFoundError:
        return "source"
