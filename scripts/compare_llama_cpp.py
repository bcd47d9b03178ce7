"""Compare our engine with llama.cpp on the same files: logits over 200 positions, best tokens.

Run: python scripts/compare_llama_cpp.py [--family NAME] [--demo ITEMS]
Needs llama.cpp's Python package: pip install 'moeinf[llama]'.

For every family a model with random weights (tests/steady.py) is pulled under each tag, exported as
GGUF, and run by both programs. llama.cpp also quantises the f32 file to its own types, which we
pull again. Columns: KL divergence of both programs' next tokens; of each program's from llama.cpp
with the same file widened to f32; of our f32 pull of the file from the same; the largest difference
of a logit; positions with another best token, and by how much ours leads there at most. `--demo`
compares greedy answers to held-out exercises.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))

from moeinf.runtime.library.library import DEMO_CHECKPOINT
from tests.exported import FAMILIES, Model, checkpoint, exported
from tests.generating import answering
from tests.gguf_wide import widened
from tests.llama_cpp_side import (
    TYPES,
    computed_as_there,
    difference,
    llama,
    our_logits,
    quantised,
)
from tests.runtime.gguf.test_against_llama_cpp import items, rendered

TAGS = ("f32", "bf16", "q8", "q4")
POSITIONS = 200


@dataclass(frozen=True)
class Row:
    """The logits of one file after the same text, by program.

    exact and reference: both programs' with every tensor in float32.
    """

    file: str
    ours: Tensor
    theirs: Tensor
    exact: Tensor
    reference: Tensor

    def figures(self) -> str:
        """Return the KL divergences, and where the best tokens differ."""
        pairs = (
            (self.ours, self.theirs),
            (self.ours, self.exact),
            (self.theirs, self.exact),
            (self.reference, self.exact),
        )
        parts = [f"{self.file:10}"]
        parts += [f"{abs(difference(one, other).kl):11.1e}" for one, other in pairs]
        found = difference(self.ours, self.theirs)
        parts.append(f"{found.largest:11.1e}{found.changed:8}{found.gap:8.2f}")
        return " ".join(parts)


def rows(name: str, folder: Path) -> Iterator[Row]:
    """Yield the logits of a family's files: those that we export, and those of llama.cpp."""
    ids = random.Random(1).choices(range(272), k=POSITIONS)
    made = checkpoint(name, folder / "checkpoint")
    with computed_as_there(name):
        for tag in TAGS:
            yield _row(tag, exported(made, folder, tag), ids)
        model = exported(made, folder / "again", "f32")
        for form in TYPES if name != "gpt-oss-rounded" else ():  # no file records the rounding
            yield _row(form, model.pulled(quantised(model.file, form)), ids)


def _row(name: str, model: Model, ids: list[int]) -> Row:
    with llama(model.file) as theirs, llama(widened(model.file)) as wide:
        with model.engine() as engine:
            ours = our_logits(engine, ids)
        with model.pulled(model.file, "f32").engine() as engine:
            reference = our_logits(engine, ids)
        return Row(name, ours, theirs.logits(ids), wide.logits(ids), reference)


def print_families(names: list[str]) -> None:
    title = f"KL divergence, mean of {POSITIONS} positions"
    print(f"{'':15} {'':10} {title:47} both programs")
    print(
        f"{'family':15} {'file':10} {'of both':>11} {'moeinf, f32':>11} {'llama, f32':>11}"
        f" {'f32, f32':>11} {'logits':>11} {'tokens':>7} {'lead':>8}"
    )
    for name in names:
        with tempfile.TemporaryDirectory() as folder:
            for row in rows(name, Path(folder)):
                print(f"{name:15} {row.figures()}", flush=True)


def print_demo(count: int) -> None:
    """Print how many greedy answers to held-out exercises are the same, and how many right."""
    for tag in TAGS:
        with tempfile.TemporaryDirectory() as folder:
            model = exported(DEMO_CHECKPOINT, Path(folder), tag)
            same = ours_right = theirs_right = 0
            with model.engine() as engine, llama(model.file) as theirs:
                for prompt, wanted in items(count):
                    ids = engine.tokenizer.encode_rendered(rendered(prompt))
                    ours, other = "".join(answering(engine, ids, 64)), theirs.chat(prompt, 64)
                    same += ours == other
                    ours_right += ours == wanted
                    theirs_right += other == wanted
        right = f"right: moeinf {ours_right}, llama.cpp {theirs_right}"
        print(f"demo:{tag:5} {same} of {count} answers are the same; {right}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--family", choices=[*FAMILIES], action="append")
    parser.add_argument("--demo", type=int, metavar="ITEMS")
    options = parser.parse_args()
    if options.demo is not None:
        print_demo(options.demo)
    if options.demo is None or options.family:
        print_families(options.family or [*FAMILIES])


if __name__ == "__main__":
    main()
