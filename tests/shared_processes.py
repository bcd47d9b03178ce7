"""Share the processes that engines and pulls start: a start of Python takes longer than most tests.

The processes themselves have their own tests, which start them as the product does.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from moeinf.runtime.engine import opening
from moeinf.runtime.hub import base_repository
from moeinf.runtime.library.repacking import repack
from moeinf.runtime.text.chat_template import TemplateWorker
from moeinf.runtime.text.tokenizer_trial import try_tokenizer

_workers: dict[str, TemplateWorker] = {}
_passed: set[bytes] = set()
_tried = base_repository._tried
_lock = threading.Lock()


class SharedTemplate:
    """A template worker for all engines of a template; it starts when the first one renders."""

    def __init__(self, template: str) -> None:
        self._template = template

    def render(self, messages: list[dict[str, str]], **variables: Any) -> str:
        with _lock:
            if self._template not in _workers:
                _workers[self._template] = TemplateWorker(self._template)
            return _workers[self._template].render(messages, **variables)

    def close(self) -> None:
        """Leave the process to other engines."""


def try_once(path: Path) -> None:
    """Try a tokenizer, unless one of the same bytes has passed."""
    digest = hashlib.sha256(path.read_bytes()).digest()
    if digest not in _passed:
        try_tokenizer(path)
        _passed.add(digest)


def tried_once(data: bytes) -> bytes:
    """Try and return a base repository's tokenizer, unless one of the same bytes has passed."""
    digest = hashlib.sha256(data).digest()
    if digest not in _passed:
        _tried(data)
        _passed.add(digest)
    return data


@contextmanager
def shared_processes() -> Iterator[None]:
    """Share them in the block, and end them after it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(opening, "TemplateWorker", SharedTemplate)
        patch.setattr(repack, "try_tokenizer", try_once)
        patch.setattr(base_repository, "_tried", tried_once)
        yield
    for worker in _workers.values():
        worker.close()
    _workers.clear()
