"""Which moeinf this is.

Does not know who asks.
"""

from __future__ import annotations

import importlib.metadata


def version() -> str:
    """What was installed; "source" when the package runs without having been installed."""
    try:
        return importlib.metadata.version("moeinf")
    except importlib.metadata.PackageNotFoundError:
        return "source"
