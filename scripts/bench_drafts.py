"""Measure decoding with and without drafts on forced answers: code edits and plain text.

    python -m scripts.bench_drafts --memory 35%

The model has OLMoE's shape and random weights (benchmarks/models.py), so its answers are forced. An
edit's prompt is a file of this repository before a commit, its answer the file after it. A text's
prompt is the beginning of a document, its answer what follows. A summary's prompt is a section of a
document, its answer the entry of CHANGELOG.md that links to it, in words of its own. A digest's
prompt is a document, its answer the first sentence of each paragraph. All are cut into tokens by a
vocabulary that is trained on the repository.

Answers with and without drafts take turns piece by piece, so both see the same neighbours. A limit
of memory needs --whole, turns of whole answers: otherwise one side finds the experts that the other
one has read. Shown are the median ratio of a text's rounds, their least and most, the costs that
the gate learned, and a bound that no gate passes: all tokens ÷ those that the text does not
predict.

--draft SHARE adds a draft model: two narrow layers of the same kind, whose passes are computed. Its
random weights predict nothing, so the right token replaces its own with that probability. --mtp
SHARE does the same with a layer for multi-token prediction, of a model of GLM-4.5's kind.
"""

from __future__ import annotations

import argparse
import random
import re
import statistics
import subprocess
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from benchmarks.models import RaceModel
from benchmarks.shapes import SHAPES
from moeinf.runtime.config import EngineConfig
from moeinf.runtime.engine.draft_engine import DraftEngine
from moeinf.runtime.engine.engine import Engine
from moeinf.runtime.engine.mtp_engine import MtpEngine
from moeinf.runtime.generation.drafts.draft_gate import ROWS
from moeinf.runtime.generation.drafts.lookup import Lookup
from moeinf.runtime.generation.events import Request
from moeinf.runtime.generation.generate import Generation
from moeinf.runtime.generation.scheduler import Scheduler
from moeinf.runtime.requests import Limits, SamplingOptions
from moeinf.runtime.sampling.sampler import Sampler
from moeinf.runtime.sizes import parse_memory

_ROOT = Path(__file__).parents[1]
_NARROW = {"num_hidden_layers": 2, "hidden_size": 1024, "intermediate_size": 512, "num_experts": 16}
_PROMPT = 950  # tokens at most
_SOURCES = (".py", ".md", ".cpp", ".h")


class Forced(Sampler):
    """Chooses the tokens of a given answer; it replaces the choice of every sampler."""

    prompt_tokens = 0
    answer: Sequence[int] = ()

    def choose(self, logits: NDArray[np.float32], history: Sequence[int]) -> int:
        return Forced.answer[len(history) - Forced.prompt_tokens]


def guessing(share: float, kind: Any) -> None:
    """Make every drafter of a kind choose the right token with this probability."""
    compute, draw = kind.extend, random.Random(1)

    def extend(self: Any, ids: Sequence[int], stopped: Callable[[], bool]) -> tuple[int, float]:
        compute(self, ids, stopped)
        at = self.place - Forced.prompt_tokens
        right = at < len(Forced.answer) and draw.random() < share
        return (Forced.answer[at] if right else 0), share

    kind.extend = extend


def git(*words: str) -> str:
    done = subprocess.run(["git", *words], cwd=_ROOT, capture_output=True, text=True, check=False)
    return done.stdout


def vocabulary() -> Tokenizer:
    """Train 16,000 pieces on the files of the repository."""
    found = Tokenizer(models.BPE())
    found.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    files = [str(_ROOT / name) for name in git("ls-files").split() if name.endswith(_SOURCES)]
    found.train(files, trainers.BpeTrainer(vocab_size=16_000, show_progress=False))
    return found


def edits() -> Iterator[tuple[str, str]]:
    """Yield a Python file before and after a commit, the newest commits first."""
    commit = ""
    for line in git("log", "--name-status", "--diff-filter=M", "--format=@%H").splitlines():
        if line.startswith("@"):
            commit = line[1:]
        elif line.endswith(".py"):
            path = line.partition("\t")[2]
            before, after = git("show", f"{commit}~:{path}"), git("show", f"{commit}:{path}")
            if before and 1500 < len(after) < 5000 and abs(len(after) - len(before)) < 800:
                yield before + "\n", after


def texts() -> Iterator[tuple[str, str]]:
    """Yield the first 600 characters of a document, and the rest."""
    for path in sorted((_ROOT / "docs").rglob("*.md")):
        text = path.read_text(encoding="utf-8")
        if 2500 < len(text) < 6000:
            yield text[:600] + "\n", text[600:]


def summaries() -> Iterator[tuple[str, str]]:
    """Yield a section of a document, and the entry of the changelog that links to it."""
    changelog = (_ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    for entry in re.findall(r"^- (.+(?:\n  .+)*)", changelog, re.MULTILINE):
        link = re.search(r"\(docs/([\w/-]+\.md)#([\w-]+)\)", entry)
        if link is None:
            continue
        document = (_ROOT / "docs" / link[1]).read_text(encoding="utf-8")
        for section in re.split(r"^(?=#+ )", document, flags=re.MULTILINE):
            title = section.partition("\n")[0].lstrip("# ").lower()
            anchor = re.sub(r"[^\w -]", "", title).replace(" ", "-")
            if anchor == link[2] and 600 < len(section) < 4000:
                yield section, entry.replace("\n ", "")


def digests() -> Iterator[tuple[str, str]]:
    """Yield a document, and the first sentences of its paragraphs."""
    for path in sorted((_ROOT / "docs").rglob("*.md")):
        text = path.read_text(encoding="utf-8")
        if 2000 < len(text) < 3500:
            found = re.findall(r"(?:^|\n\n)([A-Z][^|]+?[.:])(?=\s)", text)
            if len(found) > 3:
                yield text, "\n".join(found)


KINDS = {"edit": edits, "text": texts, "summary": summaries, "digest": digests}


class Side:
    """One way to decode, with a cache and a gate of its own."""

    def __init__(self, engine: Engine, drafts: bool) -> None:
        self.engine, self.drafts, self.scheduler = engine, drafts, Scheduler(engine)
        self.counts = [0, 0]  # of drafted tokens, and of right ones

    def answer(self, prompt: list[int], answer: list[int]) -> Generation:
        """Return an answer with forced tokens, which has not begun."""
        Forced.prompt_tokens, Forced.answer = len(prompt), answer
        request = Request(lambda _: prompt, SamplingOptions(temperature=0), Limits(len(answer)))
        return Generation(self.engine, self.scheduler, request)

    def advance(self, pieces: Iterator[str], whole: bool) -> bool:
        """Decode a piece of text, or all; False: the answer has ended."""
        engine = self.engine
        engine.info = replace(engine.info, drafts=self.drafts)
        if whole:
            "".join(pieces)
        return next(pieces, None) is not None


def turn(sides: Sequence[Side], prompt: list[int], answer: list[int], whole: bool) -> list[float]:
    """Answer once with each side, in turns; return the seconds per token of each, in order."""
    answers = [side.answer(prompt, answer) for side in sides]
    left = [(side, iter(one)) for side, one in zip(sides, answers, strict=True)]
    while left:
        left = [(side, pieces) for side, pieces in left if side.advance(pieces, whole)]
    assert all(one.tokens == answer for one in answers)
    for side, one in zip(sides, answers, strict=True):
        side.counts = [a + b for a, b in zip(side.counts, one.drafts, strict=True)]
    return [one.decode_seconds / max(1, one.decode_steps) for one in answers]


def bound(prompt: list[int], answer: list[int]) -> float:
    """Return the tokens of an answer ÷ those that its text does not predict."""
    known, history, missed = Lookup(len(prompt) + len(answer)), [*prompt, answer[0]], 0
    known.follow(history)
    for token in answer[1:]:
        missed += known.draft(1) != [token]
        history.append(token)
        known.follow(history)
    return (len(answer) - 1) / max(1, missed)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--cache", type=Path, default=Path("bench-cache"))
    parser.add_argument("--memory", default="100%")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--texts", type=int, default=4, help="of each kind")
    parser.add_argument("--tokens", type=int, default=200, help="of an answer, at most")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--kinds", nargs="*", default=list(KINDS), choices=list(KINDS))
    parser.add_argument("--whole", action="store_true", help="turns of whole answers")
    parser.add_argument("--draft", type=float, metavar="SHARE")
    parser.add_argument("--mtp", type=float, metavar="SHARE")
    given = parser.parse_args()
    kind = "olmoe" if given.mtp is None else "glm4-narrow"
    name = f"{kind}-{given.layers}"
    shape = {**SHAPES[kind], "num_hidden_layers": given.layers}
    race, pieces = RaceModel(given.cache.absolute(), name, shape), vocabulary()
    manifest = race.ours("q4")
    draft = None
    if given.draft is not None:
        small = RaceModel(race.cache, "olmoe-narrow", {**SHAPES["olmoe"], **_NARROW})
        draft = str(small.ours("q4").model)
        guessing(given.draft, DraftEngine)
    if given.mtp is not None:
        guessing(given.mtp, MtpEngine)
    memory = parse_memory(given.memory)
    config = EngineConfig(memory=memory, context=1500, trace=False, draft=draft)
    Sampler.choose = Forced.choose  # type: ignore[method-assign]
    with Engine.open(manifest, race.folder("q4"), config, race.settings) as engine:
        engine.info = replace(engine.info, ends=frozenset())
        sides = [Side(engine, drafts=False), Side(engine, drafts=True)]
        for kind in given.kinds:
            ratios, bounds = list[float](), list[float]()
            sides[1].counts = [0, 0]
            for before, after in KINDS[kind]():
                prompt, answer = pieces.encode(before).ids, pieces.encode(after).ids[: given.tokens]
                if len(prompt) > _PROMPT:
                    continue
                turn(sides, prompt, answer[:2], whole=True)  # later answers reuse the prompt
                rounds, milliseconds = list[float](), list[float]()
                for number in range(given.rounds):
                    order = sides[:: -1 if number % 2 else 1]
                    times = turn(order, prompt, answer, given.whole)[:: -1 if number % 2 else 1]
                    rounds.append(times[0] / times[1])
                    milliseconds.append(1e3 * times[1])
                ratios.append(statistics.median(rounds))
                bounds.append(bound(prompt, answer))
                print(
                    f"{kind}: {len(prompt)} + {len(answer)} tokens, with drafts "
                    f"{statistics.median(milliseconds):.1f} ms a token, {ratios[-1]:.3f} times as "
                    f"fast ({min(rounds):.3f} to {max(rounds):.3f}), bound {bounds[-1]:.2f}",
                    flush=True,
                )
                if len(ratios) == given.texts:
                    break
            drafted, accepted = sides[1].counts
            means = [statistics.geometric_mean(found) for found in (ratios, bounds)]
            print(
                f"{kind}: {len(ratios)} texts, mean {means[0]:.3f} (least {min(ratios):.3f}), "
                f"bound {means[1]:.2f}; {accepted} of {drafted} drafted tokens were right"
            )
        gate = sides[1].scheduler.speculation.gate
        costs = ", ".join(f"{rows}: {gate.cost(rows):.2f}" for rows in ROWS)
        print(f"one row {1e3 * gate.single:.1f} ms; rows: passes of one row: {costs}")
        store = engine.store.stats
        waited = f"{store.decode_stall_seconds:.1f} s waited"
        print(f"{given.memory}: hit rate {store.hit_rate:.3f}, {waited}")
        for side in sides:
            side.scheduler.close()


if __name__ == "__main__":
    main()
