"""Test that each API refuses an image in words, and what its answers are then."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

PIXEL = "iVBORw0KGgo="
URL = f"data:image/png;base64,{PIXEL}"
ASKED = {"type": "text", "text": "What is it?"}


def user(*parts: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [ASKED, *parts]}]


BODIES: dict[str, dict[str, Any]] = {
    "/api/generate": {"prompt": "What is it?", "images": [PIXEL]},
    "/api/chat": {"messages": [{"role": "user", "content": "What is it?", "images": [PIXEL]}]},
    "/v1/chat/completions": {
        "messages": user({"type": "image_url", "image_url": {"url": URL}}),
    },
    "/v1/messages": {
        "max_tokens": 9,
        "messages": user(
            {
                "type": "image",
                "source": {"type": "base64", "media_type": "image/png", "data": PIXEL},
            }
        ),
    },
    "/v1/messages/count_tokens": {
        "messages": user({"type": "image", "source": {"type": "url", "url": "http://a.example"}}),
    },
    "/v1/responses": {
        "input": [{"role": "user", "content": [{"type": "input_image", "image_url": URL}]}],
    },
    "/v1/responses/input_tokens": {
        "input": [{"role": "user", "content": [{"type": "input_image", "image_url": URL}]}],
    },
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", BODIES)
def test_an_image_is_refused_in_words(address: str, path: str, stream: bool) -> None:
    body = {"model": "demo", **BODIES[path], "stream": stream}
    answer = httpx.post(address + path, json=body, timeout=60)
    assert answer.status_code == 400
    error = answer.json()["error"]
    words = error if isinstance(error, str) else error["message"]
    assert "models here read text only" in words
