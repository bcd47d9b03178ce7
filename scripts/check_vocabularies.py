"""Compare the tokenizers made from GGUF files with llama.cpp's.

    python scripts/check_vocabularies.py FOLDER [--llama PYTHON] [--texts 10000]

FOLDER has llama.cpp's `models/ggml-vocab-*.gguf`. The files `*.gguf.inp` and `*.gguf.out` beside
them have texts and ids. With --llama, an interpreter that has llama-cpp-python also encodes random
texts, with each file and with each name of a pre-tokenizer, written into a copy of
`ggml-vocab-gpt-2.gguf`.
"""

from __future__ import annotations

import argparse
import json
import random
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

sys.path.insert(0, str(Path(__file__).parents[1]))

from moeinf.runtime.checkpoints.checkpoint import BadCheckpoint
from moeinf.runtime.gguf.vocabulary import tokenizer_files
from moeinf.runtime.gguf.word_patterns import WORDS
from tests.random_texts import random_texts

BETWEEN = "\n__ggml_vocab_test__\n"
KINDS = {
    0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q",
    12: "<d",
}  # fmt: skip
LLAMA = """
import json, sys
from llama_cpp import Llama
path, texts = json.load(sys.stdin)
model = Llama(path, vocab_only=True, verbose=False)
encode = lambda text, special: model.tokenize(text.encode(), add_bos=False, special=special)
print(json.dumps([encode(*pair) for pair in texts]))
"""


class Reader:
    """The metadata of a trusted GGUF file."""

    def __init__(self, data: bytes) -> None:
        self.data, self.at = data, 16

    def metadata(self) -> dict[str, Any]:
        count = self.number("<Q")
        return {self.text(): self.value(self.number("<I")) for _ in range(count)}

    def number(self, kind: str) -> Any:
        self.at += struct.calcsize(kind)
        return struct.unpack_from(kind, self.data, self.at - struct.calcsize(kind))[0]

    def text(self) -> str:
        size = self.number("<Q")
        self.at += size
        return self.data[self.at - size : self.at].decode("utf-8", "replace")

    def value(self, kind: int) -> Any:
        if kind == 8:
            return self.text()
        if kind == 9:
            items, count = self.number("<I"), self.number("<Q")
            return [self.value(items) for _ in range(count)]
        return self.number(KINDS[kind])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--llama", metavar="PYTHON")
    parser.add_argument("--texts", type=int, default=10_000)
    options = parser.parse_args()
    texts = list(random_texts(1, options.texts))
    wrong = 0
    with tempfile.TemporaryDirectory() as name:
        for path, count in [*relabelled(options, Path(name)), *whole(options)]:
            wrong += check(path, texts[:count], options.llama)
    sys.exit(bool(wrong))


def whole(options: argparse.Namespace) -> Iterator[tuple[Path, int]]:
    """Give the files of the folder, and how many random texts each encodes."""
    for path in sorted(options.folder.glob("*.gguf")):
        yield path, options.texts


def relabelled(options: argparse.Namespace, folder: Path) -> Iterator[tuple[Path, int]]:
    """Give copies of the vocabulary of GPT-2, one for each name of a pre-tokenizer.

    The second and later names of the same expressions encode a tenth of the texts.
    """
    source = options.folder / "ggml-vocab-gpt-2.gguf"
    if options.llama is None or not source.exists():
        return
    data, old = source.read_bytes(), written("tokenizer.ggml.pre", "gpt-2")
    seen = set()
    for name, words in WORDS.items():
        if not words.raw:
            path = folder / f"gpt-2-as-{name}.gguf"
            path.write_bytes(data.replace(old, written("tokenizer.ggml.pre", name)))
            yield path, options.texts // (10 if words in seen else 1)
            seen.add(words)


def written(key: str, value: str) -> bytes:
    """Return a pair of key and text as a GGUF file has it."""
    sized = [struct.pack("<Q", len(text)) + text.encode() for text in (key, value)]
    return sized[0] + struct.pack("<I", 8) + sized[1]


def check(path: Path, texts: list[str], llama: str | None) -> int:
    """Compare one file. Print the result, and return the number of differences."""
    try:
        files = tokenizer_files(Reader(path.read_bytes()).metadata())
    except BadCheckpoint as error:
        print(f"{path.name}: refused: {error}", flush=True)
        return 0
    tokenizer = Tokenizer.from_str(files["tokenizer.json"].decode())
    samples = [(text, False, ids) for text, ids in vectors(path)]
    if llama is not None:
        asked = [(text, False) for text in texts] + with_special(tokenizer, texts[:500])
        request = json.dumps([str(path), asked])
        command = [llama, "-c", LLAMA]
        done = subprocess.run(command, input=request, capture_output=True, text=True, check=True)
        found = json.loads(done.stdout.splitlines()[-1])
        samples += [(*pair, ids) for pair, ids in zip(asked, found, strict=True)]
    failed = 0
    for text, special, ids in samples:
        tokenizer.encode_special_tokens = not special
        ours = tokenizer.encode(text, add_special_tokens=False).ids
        failed += ours != ids
        if ours != ids and failed <= 3:
            print(f"    {text!r}\n      llama.cpp {ids}\n      ours      {ours}")
    print(f"{path.name}: {len(samples)} texts, {failed} differ", flush=True)
    return failed


def with_special(tokenizer: Tokenizer, texts: list[str]) -> list[tuple[str, bool]]:
    """Return texts with special tokens between them, which are to count."""
    tokens = [token.content for token in tokenizer.get_added_tokens_decoder().values()]
    draw = random.Random(2)
    return [(text + draw.choice(tokens) + draw.choice(texts), True) for text in texts if tokens]


def vectors(path: Path) -> Iterator[tuple[str, list[int]]]:
    """Give the texts and ids beside a file, if there are any."""
    inputs, outputs = (path.with_name(path.name + end) for end in (".inp", ".out"))
    if inputs.exists():
        texts = inputs.read_bytes().decode().split(BETWEEN)
        lines = outputs.read_text().split("\n")
        yield from (
            (t, [int(n) for n in line.split()]) for t, line in zip(texts, lines, strict=False)
        )


if __name__ == "__main__":
    main()
