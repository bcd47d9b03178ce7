"""Fuzzer targets for tokenizer files: each passes the trial of a pull or is refused by it.

A file that passed is then used in this process, which must survive.
"""

from __future__ import annotations

import atexit
import base64
import json
import struct
from contextlib import suppress
from functools import cache
from pathlib import Path

from moeinf.runtime.text.tokenizer import Tokenizer, TokenizerFailed
from moeinf.runtime.text.tokenizer_trial import Trial
from tests.tokenizer_files import LETTERS, good, hostile

_KIMI = {"auto_map": {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]}}
_TEXTS = ("17+25= hi", "a" * 100 + "!", " \n" * 100 + "x", "<s> é日\U0001f642\x00")


@cache
def _trial() -> Trial:
    trial = Trial(seconds=8)
    atexit.register(trial.close)
    return trial


def tokenizer(data: bytes, folder: Path) -> None:
    path = folder / "tokenizer.json"
    path.write_bytes(data)
    _trial().of_file(path)
    found = Tokenizer(folder)
    for text in _TEXTS:
        with suppress(TokenizerFailed):
            found.decode(found.encode_text(text)[:50])
            found.encode_rendered(found.guard(text))


def sentencepiece(data: bytes, folder: Path) -> None:
    (folder / "tokenizer.json").write_bytes(_trial().of_vocabulary(data, {}, "spiece.model"))
    Tokenizer(folder)


def tiktoken(data: bytes, folder: Path) -> None:
    (folder / "tokenizer.json").write_bytes(_trial().of_vocabulary(data, _KIMI, "tiktoken.model"))
    Tokenizer(folder)


def tiktokens() -> list[bytes]:
    tokens = [*(bytes([byte]) for byte in range(256)), b"ab", b"abab", "é日".encode()]
    lines = (base64.b64encode(token) + f" {rank}".encode() for rank, token in enumerate(tokens))
    return [b"\n".join(lines)]


def tokenizers() -> list[bytes]:
    """Return valid and small hostile files whose vocabulary leaves room to mutate."""
    found = []
    for _, file in [*good(), *list(hostile())[::3]]:
        vocabulary = file.get("model", {}).get("vocab")
        if isinstance(vocabulary, dict) and len(vocabulary) == len(LETTERS):
            model = {**file["model"], "vocab": {c: n for c, n in vocabulary.items() if n < 94}}
            file = {**file, "model": model}
        data = json.dumps(file).encode()
        if len(data) < 8192:
            found.append(data)
    return found


def sentencepieces() -> list[bytes]:
    def field(number: int, body: bytes) -> bytes:
        return bytes([number << 3 | 2, len(body)]) + body

    def piece(text: bytes, kind: int) -> bytes:
        return field(1, field(1, text) + b"\x15" + struct.pack("<f", -1.0) + bytes([0x18, kind]))

    pieces = piece(b"<unk>", 2) + piece(b"<s>", 3) + piece(b"</s>", 3) + piece(b"a", 1)
    pieces += piece("\u2581".encode(), 1) + piece(b"b", 1) + piece(b"<0x41>", 6)
    trainer = field(2, bytes([3 << 3, 2]))
    return [pieces, pieces + trainer, pieces + trainer + field(3, bytes([3 << 3, 1]))]
