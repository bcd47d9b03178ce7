"""Try a downloaded tokenizer in a limited process before this process loads it.

For some files the library panics, aborts, or never ends. A file that does so on a test text never
becomes part of a model.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from moeinf.runtime.checkpoints import sentencepiece
from moeinf.runtime.checkpoints.checkpoint import BadCheckpoint, read_json
from moeinf.runtime.checkpoints.sentencepiece import MAX_BYTES
from moeinf.runtime.limited_process import LimitedProcess, LimitExceeded, Refused
from moeinf.runtime.text import tiktoken

CONVERTED = (*sentencepiece.NAMES, *tiktoken.NAMES)  # files that become a tokenizer.json
MOST_TEMPLATE_BYTES = 1 << 20  # of all chat templates of a model together
TRIAL_SECONDS = 60.0  # of wall time; a vocabulary of 250,000 takes some 3 s


class Trial:
    """A process for trials, one at a time. Use it as a context manager."""

    def __init__(self, seconds: float = TRIAL_SECONDS) -> None:
        self._seconds = seconds
        self._process = LimitedProcess("moeinf.runtime.text.tokenizer_worker")

    def __enter__(self) -> Trial:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._process.close()

    def of_file(self, path: Path) -> None:
        """Check that a tokenizer.json loads, encodes and decodes in time. Raises BadCheckpoint."""
        self._ask({"path": str(path.absolute())}, f"{path.name} is refused")

    def of_vocabulary(self, data: bytes, about: Mapping[str, Any], name: str) -> bytes:
        """Convert a file of a vocabulary to tokenizer.json; return its bytes.

        name: the file's, of CONVERTED, or another one for SentencePiece. about: its
        tokenizer_config.json, or empty. Raises BadCheckpoint, which names the file, if the file is
        damaged or cannot be converted.
        """
        if len(data) > MAX_BYTES:
            raise BadCheckpoint(f"{name} is too large ({len(data)} bytes)")
        with tempfile.TemporaryDirectory(prefix="moeinf-tokenizer-") as folder:
            model, made = Path(folder) / "model", Path(folder) / "tokenizer.json"
            model.write_bytes(data)
            request = {"model": str(model), "about": about, "path": str(made), "name": name}
            self._ask(request, f"{name} cannot be converted")
            return made.read_bytes()

    def _ask(self, request: dict[str, Any], failed: str) -> None:
        try:
            self._process.ask(request, self._seconds)
        except (Refused, LimitExceeded) as error:
            raise BadCheckpoint(f"{failed}: {error}") from None


def try_tokenizer(path: Path) -> None:
    """Check that the tokenizer.json at `path` loads and works in time. Raises BadCheckpoint."""
    with Trial() as trial:
        trial.of_file(path)


def check_templates(folder: Path) -> None:
    """Raise BadCheckpoint if the chat templates in a folder are too long."""
    file, config = folder / "chat_template.jinja", folder / "tokenizer_config.json"
    size = file.stat().st_size if file.is_file() else 0
    given = read_json(config).get("chat_template") if config.is_file() else None
    named = given if isinstance(given, list) else [{"template": given}]
    for one in named:
        text = one.get("template") if isinstance(one, dict) else None
        size += len(text.encode("utf-8", "replace")) if isinstance(text, str) else 0
    if size > MOST_TEMPLATE_BYTES:
        words = f"a chat template of {size} bytes is refused (at most {MOST_TEMPLATE_BYTES})"
        raise BadCheckpoint(words)


def convert(read: Callable[[str], bytes | None]) -> bytes | None:
    """Convert the first of CONVERTED that a repository has; return None if it has none of them.

    Raises BadCheckpoint.
    """
    for name in CONVERTED:
        data = read(name)
        if data is None:
            continue
        config = read("tokenizer_config.json")
        try:
            about = json.loads(config) if config is not None else {}
        except (ValueError, RecursionError) as error:
            raise BadCheckpoint(f"tokenizer_config.json is not JSON: {error}") from error
        with Trial() as trial:
            return trial.of_vocabulary(data, about if isinstance(about, dict) else {}, name)
    return None
