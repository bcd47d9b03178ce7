"""Compare our engine with llama.cpp on the same files: logits over 200 positions, best tokens.

Run: python scripts/compare_llama_cpp.py [--family NAME] [--demo ITEMS]
Needs llama.cpp's Python package: pip install 'moeinf[llama]'.

For every family a model with random weights is pulled under each tag, exported as GGUF, and run by
both programs. llama.cpp also quantises the f32 file to its own types, which we pull again, where
moeinf reads them. Columns: KL divergence of both programs' next tokens; of each program's from
llama.cpp with the same file widened to f32; the largest difference of a logit; positions with
another best token, and by how much ours leads there at most. `--demo` compares greedy answers to
held-out exercises.
"""

from __future__ import annotations

import argparse
import ctypes
import random
import sys
import tempfile
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import llama_cpp  # pyright: ignore[reportMissingImports]
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))

from moeinf.runtime.checkpoints.checkpoint import BadCheckpoint
from moeinf.runtime.config import EngineConfig
from moeinf.runtime.engine.engine import Engine
from moeinf.runtime.hub.resolve import find_source
from moeinf.runtime.library.library import DEMO_CHECKPOINT, Library
from moeinf.runtime.library.repack import repack
from moeinf.runtime.sizes import parse_memory
from tests.conftest import ignore
from tests.exported import FAMILIES, Model, checkpoint, exported
from tests.generating import answering
from tests.llama_cpp_side import difference, llama, our_logits, widened
from tests.runtime.gguf.test_against_llama_cpp import items, rendered

TAGS = ("f32", "bf16", "q8", "q4")
TYPES = {  # llama.cpp's own quantisations, by llama_ftype
    "Q4_0": 2,
    "Q8_0": 7,
    "Q4_K_M": 15,
    "Q5_K_M": 17,
    "Q6_K": 18,
    "MXFP4_MOE": 38,
}
POSITIONS = 200


def quantised(file: Path, form: str) -> Path:
    """Return a copy of an f32 file in which llama.cpp has quantised the matrices."""
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype, params.nthread = TYPES[form], 1
    made = file.with_name(f"{form}.gguf")
    given = (str(file).encode(), str(made).encode(), ctypes.byref(params))
    assert llama_cpp.llama_model_quantize(*given) == 0, form
    return made


def imported(file: Path, model: Model) -> Engine | None:
    """Open llama.cpp's file in our engine, or return None if it does not read GGUF."""
    settings, library = model.settings, Library(model.settings)
    try:
        name, source = find_source(str(file), file.stem.lower(), settings, ignore)
        manifest = repack(source, library, name, ignore, ignore)
    except BadCheckpoint as error:
        print(f"{file.name}: {error}", file=sys.stderr)
        return None
    config = EngineConfig(memory=parse_memory("100%"))
    return Engine.open(manifest, library.folder(name), config, settings)


@dataclass(frozen=True)
class Row:
    """The logits of one file after the same text, by program. exact: without rounding."""

    file: str
    ours: Tensor | None
    theirs: Tensor
    exact: Tensor

    def figures(self) -> str:
        """Return the KL divergences and, if both programs ran it, their best tokens."""
        parts = [f"{self.file:10}"]
        pairs = ((self.ours, self.theirs), (self.ours, self.exact), (self.theirs, self.exact))
        for one, other in pairs:
            kl = "-" if one is None or other is None else f"{difference(one, other).kl:.1e}"
            parts.append(f"{kl:>11}")
        if self.ours is not None:
            found = difference(self.ours, self.theirs)
            parts.append(f"{found.largest:11.1e}{found.changed:8}")
            parts.append(f"{found.gap:8.2f}" if found.changed else "")
        return " ".join(parts).rstrip()


def rows(name: str, folder: Path) -> Iterator[Row]:
    """Yield the logits of a family's files: those that we export, and those of llama.cpp."""
    ids = random.Random(1).choices(range(272), k=POSITIONS)
    made = checkpoint(name, folder / "checkpoint")
    for tag in TAGS:
        model = exported(made, folder, tag)
        with model.engine() as engine:
            yield _row(tag, model.file, ids, engine)
    model = exported(made, folder / "again", "f32")
    for form in TYPES:
        file = quantised(model.file, form)
        with imported(file, model) or nullcontext() as opened:
            yield _row(form, file, ids, opened)


def _row(name: str, file: Path, ids: list[int], engine: Engine | None) -> Row:
    with llama(file) as theirs, llama(widened(file)) as wide:
        ours = None if engine is None else our_logits(engine, ids)
        return Row(name, ours, theirs.logits(ids), wide.logits(ids))


def print_families(names: list[str]) -> None:
    print(f"{'':14} {'':10} KL divergence, mean of {POSITIONS} positions       both programs")
    print(
        f"{'family':14} {'file':10} {'of both':>11} {'moeinf, f32':>11} {'llama, f32':>11}"
        f" {'logits':>11} {'tokens':>7} {'lead':>8}"
    )
    for name in names:
        with tempfile.TemporaryDirectory() as folder:
            for row in rows(name, Path(folder)):
                print(f"{name:14} {row.figures()}", flush=True)


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
