"""Read prompts from local .jsonl, .txt and .parquet files, in file order."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from moeinf.runtime.jobs.datasets.items import MOST_ROWS, BadDataset, Item, NoSuchDataset, Wanted
from moeinf.runtime.jobs.datasets.rows import (
    Kind,
    Row,
    json_rows,
    lines,
    parquet_columns,
    parquet_rows,
    text_of,
)

_PROMPTS = ("prompt", "inputs", "input", "question", "text")  # columns; the first found is read
_TASKS = ("task", "kind")
_ENDINGS = (".jsonl", ".txt", ".parquet")


def is_file_name(text: str) -> bool:
    """Return True if --dataset names a local file."""
    return text.lower().endswith(_ENDINGS)


def read_file(path: Path, wanted: Wanted) -> list[Item]:
    """Return the first wanted.limit prompts, of the tasks in --subset if it is given.

    .txt: a prompt per line. .jsonl: a string or an object per line. .parquet: a row per prompt. The
    text is in the first present column of prompt, inputs, input, question, text. The task is in
    task or kind. Raises BadDataset, NoSuchDataset.
    """
    if not path.exists():
        raise NoSuchDataset(f"{path} does not exist")
    items = {".txt": _text, ".jsonl": _jsonl, ".parquet": _parquet}[path.suffix.lower()](path)
    chosen = (item for item in items if wanted.subset is None or item.task in wanted.subset)
    found = list(islice(chosen, min(wanted.limit, MOST_ROWS)))
    if not found and wanted.subset is not None:
        raise NoSuchDataset(f"{path} has no prompt of task {', '.join(wanted.subset)}")
    return found


def _text(path: Path) -> Iterator[Item]:
    for number, line in lines(path):
        yield Item(text_of({"line": line}, "line", f"{path}:{number}"))


def _jsonl(path: Path) -> Iterator[Item]:
    for number, row in json_rows(path):
        yield _item(row, list(row), f"{path}:{number}")


def _parquet(path: Path) -> Iterator[Item]:
    there = parquet_columns(path)
    named = [name for name in _PROMPTS if name in there][:1]
    if not named:
        raise BadDataset(f"{path} has none of the columns {', '.join(_PROMPTS)}")
    columns: dict[str, Kind] = {named[0]: "text"}
    for task in _TASKS:
        if task in there:
            columns[task] = "text"
    for number, row in enumerate(parquet_rows(path, columns, MOST_ROWS)):
        yield _item(row, list(columns), f"{path}, row {number}")


def _item(row: Row, columns: list[str], where: str) -> Item:
    name = next((name for name in _PROMPTS if name in columns), None)
    if name is None:
        raise BadDataset(f"{where} has none of {', '.join(_PROMPTS)}")
    task = next((row[name] for name in _TASKS if isinstance(row.get(name), str)), "")
    return Item(text_of(row, name, where), task[:100])
