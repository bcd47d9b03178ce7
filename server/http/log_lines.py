"""Make control characters visible in the lines that the HTTP library logs."""

from __future__ import annotations

import copy
import logging
from typing import Any

from uvicorn.config import LOGGING_CONFIG
from uvicorn.logging import DefaultFormatter

from moeinf.runtime.visible import visible


class VisibleFormatter(DefaultFormatter):
    """uvicorn's formatter with visible control characters, also in tracebacks."""

    def format(self, record: logging.LogRecord) -> str:
        return visible(super().format(record))


def log_config() -> dict[str, Any]:
    """Return uvicorn's logging configuration with VisibleFormatter and without colours."""
    config: dict[str, Any] = copy.deepcopy(LOGGING_CONFIG)
    config["formatters"]["default"] |= {"()": VisibleFormatter, "use_colors": False}
    return config
