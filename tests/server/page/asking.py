"""Ask in the page's chat, and read or script the answer."""

from __future__ import annotations

import json
from typing import Any


def ask(page: Any, words: str) -> Any:
    """Ask, and return the complete answer's element."""
    page.fill("#question", words)
    page.keyboard.press("Enter")
    return complete(page)


def complete(page: Any) -> Any:
    """Wait for the end of the answer, and return its element."""
    page.wait_for_selector("button:has-text('Send'):not([disabled])")
    return page.locator("article.answer").last


def told(page: Any, lines: list[dict[str, Any]]) -> None:
    """Let the server answer with these lines."""
    body = "".join(json.dumps(line) + "\n" for line in lines)
    page.route("**/api/chat", lambda route: route.fulfill(body=body))


def delete_chat(page: Any, title: str) -> None:
    """Delete a chat of the open history, and say yes."""
    page.get_by_role("button", name=f"Delete {title}", exact=True).click()
    dialog = page.get_by_role("dialog", name=f"Delete the chat {title}?")
    dialog.get_by_role("button", name="Delete").click()
