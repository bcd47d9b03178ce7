"""Define the named data sets: their repositories, their tasks, and their prompts.

Repositories, columns and the MMLU prompt are those of the data sets' authors: cais/mmlu (Hendrycks
et al., arXiv 2009.03300), tasksource/bigbench, SaylorTwift/bbh and Muennighoff/flan.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from moeinf.runtime.jobs.datasets.hub import DatasetFiles
from moeinf.runtime.jobs.datasets.items import (
    MOST_ROWS,
    BadDataset,
    Item,
    NoSuchDataset,
    Wanted,
    chosen_tasks,
    deal,
)
from moeinf.runtime.jobs.datasets.local import is_file_name, read_file
from moeinf.runtime.jobs.datasets.rows import Kind, Row, json_rows, parquet_rows, text_of
from moeinf.runtime.names import in_home
from moeinf.runtime.sizes import Progress

_PART = "-00000-of-00001.parquet"
_HEADER = "The following are multiple choice questions (with answers) about {}.\n\n"
_LETTERS = "ABCD"
_MMLU: dict[str, Kind] = {
    "question": "text",
    "subject": "text",
    "choices": "texts",
    "answer": "integer",
}
_FLAN = re.compile(r"(?P<split>[^/]++)/(?P<task>[^/]+)_10templates_(?P=split)\.jsonl")


def dataset_names() -> list[str]:
    return sorted(_TABLE)


def load_items(
    dataset: str, wanted: Wanted, folder: Path, heldout: Path, progress: Progress
) -> list[Item]:
    """Return at most wanted.limit prompts of a data set or a local file.

    folder: the folder for fetched files. heldout: the demo's file. Raises NoSuchDataset,
    BadDataset, RepositoryError, DownloadFailed.
    """
    if is_file_name(dataset):
        items = read_file(in_home(dataset), wanted)
    elif dataset == "demo":
        items = _by_task(dataset, read_file(heldout, Wanted(limit=MOST_ROWS)), wanted)
    elif dataset in _TABLE:
        repository, read = _TABLE[dataset]
        assert read is not None
        items = read(DatasetFiles(repository, folder, progress), wanted)
    else:
        raise NoSuchDataset(
            f"{dataset!r} is not one of {', '.join(dataset_names())}, "
            "nor a .jsonl, .txt or .parquet file"
        )
    if not items:
        raise BadDataset(f"{dataset} gives no prompts")
    return items


def _by_task(dataset: str, items: Iterable[Item], wanted: Wanted) -> list[Item]:
    """Return a mix of items that are all loaded."""
    hands: dict[str, list[Item]] = {}
    for item in items:
        hands.setdefault(item.task, []).append(item)
    tasks = chosen_tasks(dataset, hands.keys(), wanted)
    return deal(tasks, lambda task: hands[task], wanted)


def _mmlu(files: DatasetFiles, wanted: Wanted) -> list[Item]:
    """Return questions, each after `shots` solved ones of the same subject."""
    if wanted.subset is None:
        folders = ["all"]
    else:
        folders = chosen_tasks("mmlu", _folders(files, f"/test{_PART}"), wanted)
    examples: dict[str, list[str]] = {}
    items: list[Item] = []
    for folder in folders:
        if wanted.shots:
            for row, where in _rows(files, f"{folder}/dev{_PART}", _MMLU):
                examples.setdefault(row["subject"], []).append(mmlu_question(row, True, where))
        for row, where in _rows(files, f"{folder}/test{_PART}", _MMLU):
            subject = text_of(row, "subject", where)
            shots = "".join(examples.get(subject, [])[: wanted.shots])
            header = _HEADER.format(subject.replace("_", " "))
            items.append(Item(header + shots + mmlu_question(row, False, where), subject))
    return _by_task("mmlu", items, Wanted(wanted.limit, None, wanted.shots, wanted.seed))


def mmlu_question(row: Row, solved: bool, where: str) -> str:
    """Format a question with its four choices. It ends with `Answer:`, or with the answer.

    The answer is followed by an empty line.
    """
    choices, answer = row.get("choices"), row.get("answer")
    texts = isinstance(choices, list) and all(isinstance(choice, str) for choice in choices)
    if not (texts and isinstance(choices, list) and len(choices) == len(_LETTERS)):
        raise BadDataset(f"{where}: a question has {len(_LETTERS)} choices")
    if not isinstance(answer, int) or not 0 <= answer < len(_LETTERS):
        raise BadDataset(f"{where}: the answer is {answer!r}, not 0 … 3")
    options = "".join(f"{x}. {text}\n" for x, text in zip(_LETTERS, choices, strict=True))
    ending = f" {_LETTERS[answer]}\n\n" if solved else ""
    return f"{text_of(row, 'question', where)}\n{options}Answer:{ending}"


def _bigbench(files: DatasetFiles, wanted: Wanted) -> list[Item]:
    """Return `inputs` of the validation split, which is the smaller one."""
    return _verbatim(files, wanted, "bigbench", f"/validation{_PART}", "inputs")


def _bbh(files: DatasetFiles, wanted: Wanted) -> list[Item]:
    return _verbatim(files, wanted, "bbh", f"/test{_PART}", "input")


def _verbatim(
    files: DatasetFiles, wanted: Wanted, dataset: str, ending: str, column: str
) -> list[Item]:
    """Return prompts from one column of one parquet file per task."""

    def read(task: str) -> Iterator[Item]:
        for row, where in _rows(files, task + ending, {column: "text"}):
            yield Item(text_of(row, column, where), task)

    return deal(chosen_tasks(dataset, _folders(files, ending), wanted), read, wanted)


def _flan(files: DatasetFiles, wanted: Wanted) -> list[Item]:
    """Return `inputs` verbatim, from the first split present of test, validation, train."""
    found = [match for name in files.names if (match := _FLAN.fullmatch(name))]
    splits = {match["split"] for match in found}
    split = next((s for s in ("test", "validation", "train") if s in splits), None)
    paths = {match["task"]: match.string for match in found if match["split"] == split}

    def read(task: str) -> Iterator[Item]:
        for number, row in json_rows(files.bring(paths[task])):
            if number > MOST_ROWS:
                return
            yield Item(text_of(row, "inputs", f"{paths[task]}:{number}"), task)

    return deal(chosen_tasks("flan", paths.keys(), wanted), read, wanted)


def _folders(files: DatasetFiles, ending: str) -> set[str]:
    """Return the tasks, each of which has one folder with a file."""
    found = {name.removesuffix(ending) for name in files.names if name.endswith(ending)}
    return found - {"all"}


def _rows(files: DatasetFiles, name: str, columns: dict[str, Kind]) -> Iterator[tuple[Row, str]]:
    path = files.bring(name)
    for number, row in enumerate(parquet_rows(path, columns, MOST_ROWS)):
        yield row, f"{name}, row {number}"


_TABLE: dict[str, tuple[str, Callable[[DatasetFiles, Wanted], list[Item]] | None]] = {
    "mmlu": ("cais/mmlu", _mmlu),
    "bigbench": ("tasksource/bigbench", _bigbench),
    "bbh": ("SaylorTwift/bbh", _bbh),
    "flan": ("Muennighoff/flan", _flan),
    "demo": ("", None),
}
