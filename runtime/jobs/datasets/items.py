"""Define the prompts of a data set, their tasks, and how a mix of tasks is chosen."""

from __future__ import annotations

import difflib
import random
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import zip_longest

from moeinf.errors import InvalidInput, UnusableInput

MOST_ROWS = 20_000  # of one file: a trace needs no more, and an untrusted file must be bounded
MOST_CHARACTERS = 1 << 20  # of one prompt


class NoSuchDataset(InvalidInput, ValueError):
    """No data set, task or file has that name."""

    code = "no_such_dataset"
    hint = "`moeinf trace --help`, which has examples"


class BadDataset(UnusableInput, ValueError):
    """A file is not a data set. The message names the file and what is wrong."""

    code = "bad_dataset"
    hint = (
        "a .txt file with a prompt per line, or a .jsonl or .parquet file with a column named "
        "prompt"
    )


@dataclass(frozen=True)
class Item:
    """One prompt. `task` is its kind of work, or "" if the source names none."""

    prompt: str
    task: str = ""


@dataclass(frozen=True)
class Wanted:
    """The choice of items: at most `limit`, from the tasks in `subset`, mixed by `seed`.

    subset None: all tasks. shots: the number of solved examples before a question (MMLU).
    """

    limit: int = 100
    subset: tuple[str, ...] | None = None
    shots: int = 5
    seed: int = 0


def deal(tasks: Sequence[str], read: Callable[[str], Iterable[Item]], wanted: Wanted) -> list[Item]:
    """Take one item of each task in turn, in seeded order, until there are `limit`.

    Reads only as many tasks as necessary, so that few prompts need few files.
    """
    draw = random.Random(wanted.seed)
    order = draw.sample(sorted(tasks), len(tasks))
    hands: list[list[Item]] = []
    for task in order:
        if len(hands) == wanted.limit:
            break
        hand = sorted(read(task), key=lambda item: item.prompt)
        if hand:
            draw.shuffle(hand)
            hands.append(hand)
    rounds = zip_longest(*hands)
    return [item for dealt in rounds for item in dealt if item is not None][: wanted.limit]


def chosen_tasks(dataset: str, known: Collection[str], wanted: Wanted) -> list[str]:
    """Return the tasks that --subset names, or all. Raises NoSuchDataset with the nearest names."""
    if wanted.subset is None:
        return sorted(known)
    for task in wanted.subset:
        if task not in known:
            near = difflib.get_close_matches(task, known, 3, 0.4) or sorted(known)[:3]
            raise NoSuchDataset(
                f"{dataset} has no subset {task!r}; the nearest of {len(known)} are: "
                f"{', '.join(near)}"
            )
    return list(dict.fromkeys(wanted.subset))
