"""Write JSON without NaN."""

from __future__ import annotations

import json
import math
from typing import Any

from fastapi.responses import JSONResponse


def dump(value: Any) -> str:
    """Return JSON in ASCII; numbers that JSON lacks are null."""
    try:
        return json.dumps(value, allow_nan=False)
    except ValueError:
        return json.dumps(_finite(value), allow_nan=False)


class Answer(JSONResponse):
    """A whole answer in JSON."""

    def render(self, content: Any) -> bytes:
        return dump(content).encode()


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    return value
