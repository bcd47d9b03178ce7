"""The lines that the HTTP library logs: control characters of requests are made visible.

Does not know what is logged.
"""

from __future__ import annotations

import copy
import logging
from typing import Any

from uvicorn.config import LOGGING_CONFIG
from uvicorn.logging import DefaultFormatter

from moeinf.runtime.visible import visible


class VisibleFormatter(DefaultFormatter):
    """As uvicorn's, tracebacks included."""

    def format(self, record: logging.LogRecord) -> str:
        return visible(super().format(record))


def log_config() -> dict[str, Any]:
    """Return uvicorn's configuration of logging, with this formatter and without colours."""
    config: dict[str, Any] = copy.deepcopy(LOGGING_CONFIG)
    config["formatters"]["default"] |= {"()": VisibleFormatter, "use_colors": False}
    return config
