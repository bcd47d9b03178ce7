"""Convert, load and try tokenizer files: the child process of tokenizer_trial.py.

It does not import torch, since it has 4 GiB of address space.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from moeinf.runtime.checkpoints.sentencepiece import tokenizer_json
from moeinf.runtime.limited_process import serve
from moeinf.runtime.text import tiktoken
from moeinf.runtime.text.tiktoken import kimi_json

_ADDRESS_SPACE_BYTES = 4 << 30
_LONGEST_TOKEN = 1024  # characters
_MOST_TOKENS = 1 << 24
_MOST_GROWTH = 16  # maximum characters that all replacements together may make of one
_TOKENS_PER_BYTE = 4
_TOKENS_AROUND = 64  # added to a text by its post-processor
_SAMPLES = (
    "The quick brown fox: it's 12,345.67 o'clock!\r\n\tdéjà vu, ﬁne ½ Ａ ™ e\u0301 ＜ｓ＞\n\n",
    "日本語のテキスト。Русский текст, עברית, العربية, हिन्दी, 👩\u200d👩\u200d👧 🙂🏽",
    "\u0000\u00a0\ufeff\ue000\ufffd",
    "def f(x):\n        return [x ** 2 for _ in range(10)]  # ~`@#$%^&*()-+={}[]|\\;\"'<>?/\n",
)
_RUNS = (
    " ",
    "\n",
    "\t",
    " \n",
    "a",
    "A",
    "aA",
    "1",
    ".",
    "_",
    "é",
    "日",
    "\u0301",
    "🙂",
    "\u00a0",
    "x y",
)
_LONG_RUNS = (" ", "\n", "a", "1", ".")


class BadTokenizer(ValueError):
    """A file loads but cannot be used."""


def texts() -> Iterator[str]:
    """Yield test texts: sentences, and runs of every kind of character.

    A run reveals a pattern that takes exponential or cubic time.
    """
    yield from ("", "a", *_SAMPLES, "".join(_SAMPLES) * 20)
    yield "".join(chr(code) * 64 + "\x01" for code in range(0x20, 0x7F))
    yield from (run * 600 + end for run in _RUNS for end in ("", "b"))


def _check_time(tokenizer: Tokenizer) -> None:
    """Raise BadTokenizer if time grows with the square of a text.

    If 6,000 characters take more than some hundredths of a second, some megabytes would take hours.
    """

    def seconds(length: int) -> float:
        start = time.process_time()
        tokenizer.encode(run * length + "b")
        return time.process_time() - start

    for run in _LONG_RUNS:
        if all(seconds(6000) > max(0.06, 12 * seconds(1000)) for _ in range(2)):
            raise BadTokenizer(f"its time grows with the square of a text of {run!r}")


def load(path: Path) -> Tokenizer:
    """Load a tokenizer; remove its saved truncation and padding."""
    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def examine(path: Path) -> None:
    """Load a tokenizer.json, encode and decode. Raises the library's errors, and BadTokenizer.

    A panic is raised as an exception. A crash, or too much time or memory, ends this process.
    """
    _check_growth(json.loads(path.read_bytes()))
    tokenizer = load(path)
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    longest = max(map(len, vocabulary), default=0)
    if longest > _LONGEST_TOKEN or max(vocabulary.values(), default=0) >= _MOST_TOKENS:
        raise BadTokenizer("a token has too many characters, or too large a number")
    for text in texts():
        for special in (False, True):
            tokenizer.encode_special_tokens = special
            ids = tokenizer.encode(text, add_special_tokens=not special).ids
            if len(ids) > _TOKENS_AROUND + _TOKENS_PER_BYTE * len(text.encode()):
                raise BadTokenizer(f"it makes {len(ids)} tokens of {len(text)} characters")
        tokenizer.decode(ids, skip_special_tokens=False)
        tokenizer.decode(ids, skip_special_tokens=True)
    _check_time(tokenizer)
    for token in vocabulary.values():
        tokenizer.decode([token], skip_special_tokens=False)


def _check_growth(document: Any) -> None:
    """Raise BadTokenizer if replacements could repeatedly turn one character into many."""
    growth, nodes = 1.0, [document.get("normalizer"), document.get("decoder")]
    while nodes:
        node = nodes.pop()
        if isinstance(node, list):
            nodes += node
        elif isinstance(node, dict):
            nodes += [value for value in node.values() if isinstance(value, dict | list)]
            content, pattern = node.get("content", node.get("prepend")), node.get("pattern")
            if isinstance(content, str):
                cut = pattern.get("String") if isinstance(pattern, dict) else pattern
                growth *= max(1.0, len(content) / max(1, len(cut) if isinstance(cut, str) else 1))
    if growth > _MOST_GROWTH:
        raise BadTokenizer("its replacements expand one character to many")


def _handle(request: dict[str, Any]) -> None:
    into = Path(request["path"])
    if "about" in request:
        data = Path(request["model"]).read_bytes()
        made = kimi_json if request["name"] in tiktoken.NAMES else tokenizer_json
        into.write_bytes(made(data, request["about"]))
    examine(into)


def main() -> None:
    serve(_handle, _ADDRESS_SPACE_BYTES)


if __name__ == "__main__":
    main()
