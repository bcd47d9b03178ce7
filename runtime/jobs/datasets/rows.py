"""Read rows of untrusted .jsonl, .txt and .parquet files, after a check of their size.

A row is a mapping from column to value. Only the requested columns are read.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import pyarrow
import pyarrow.compute
import pyarrow.parquet
from pyarrow import types

from moeinf.errors import problem
from moeinf.runtime.jobs.datasets.footer import can_be_walked
from moeinf.runtime.jobs.datasets.items import MOST_CHARACTERS, BadDataset

Kind = Literal["text", "texts", "integer"]
Row = Mapping[str, Any]

_MAX_FILE_BYTES = 256 << 20
_MAX_COLUMN_BYTES = 1 << 30  # of one parquet column, uncompressed
_MAX_VALUES = 1 << 24  # of one parquet column
_BATCH_ROWS = 64  # a batch of equal dictionary entries may grow to this times MOST_CHARACTERS


def check_size(path: Path) -> None:
    """Raise BadDataset unless `path` is a readable file of at most _MAX_FILE_BYTES."""
    try:
        if not path.is_file():
            raise BadDataset(f"{path} is not a file")
        size = path.stat().st_size
    except OSError as error:
        raise BadDataset(f"{path}: {problem(error)}") from error
    if size > _MAX_FILE_BYTES:
        raise BadDataset(f"{path} has {size >> 20} MiB; at most {_MAX_FILE_BYTES >> 20} are read")


def lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the non-empty lines with their numbers, from 1. Raises BadDataset."""
    check_size(path)
    longest = 4 * MOST_CHARACTERS  # bytes
    try:
        with path.open("rb") as file:
            number = 0
            while raw := file.readline(longest + 1):
                number += 1
                if len(raw) > longest:
                    raise BadDataset(f"{path}:{number} is longer than {longest >> 20} MiB")
                text = raw.decode("utf-8").strip("\r\n")
                if text.strip():
                    yield number, text
    except UnicodeDecodeError as error:
        raise BadDataset(f"{path}:{number} is not UTF-8 text") from error
    except OSError as error:
        raise BadDataset(f"{path}: {problem(error)}") from error


def json_rows(path: Path) -> Iterator[tuple[int, Row]]:
    """Yield one row per line; a string is the column "prompt". Raises BadDataset."""
    for number, line in lines(path):
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise BadDataset(f"{path}:{number} is not JSON") from error
        if isinstance(row, str):
            row = {"prompt": row}
        if not isinstance(row, dict):
            raise BadDataset(f"{path}:{number} is neither a JSON object nor a string")
        yield number, row


def parquet_columns(path: Path) -> list[str]:
    """Return the names of the top-level columns. Raises BadDataset."""
    with _Opened(path) as file:
        return [str(name) for name in file.schema_arrow.names]


def parquet_rows(path: Path, columns: Mapping[str, Kind], most: int) -> Iterator[Row]:
    """Yield the first `most` rows, with `columns` only. Raises BadDataset, also for wrong types."""
    there = parquet_columns(path)
    texts = [name for name, kind in columns.items() if kind == "text" and name in there]
    with _Opened(path, read_dictionary=texts) as file:
        for name, kind in columns.items():
            _check_type(path, file.schema_arrow, name, kind)
        if not can_be_walked(path):
            raise BadDataset(f"{path} is not a readable parquet file: its footer is damaged")
        _check_bounds(path, file.metadata, columns)
        left = most
        for batch in file.iter_batches(_BATCH_ROWS, columns=list(columns), use_threads=False):
            for name in texts:
                column = batch.column(name)
                distinct = getattr(
                    column, "dictionary", column
                )  # old large_string has no dictionary
                sizes = pyarrow.compute.binary_length(distinct)
                longest = pyarrow.compute.max(sizes).as_py()
                if (longest or 0) > 4 * MOST_CHARACTERS:
                    raise BadDataset(f"{path}: a value of {name} has {longest} bytes")
            yield from batch.slice(0, left).to_pylist()
            left -= batch.num_rows
            if left <= 0:
                return


def text_of(row: Row, name: str, where: str) -> str:
    """Return a column's text. Raises BadDataset if it is empty, not a text, or too long."""
    value = row.get(name)
    if not isinstance(value, str) or not value.strip():
        raise BadDataset(f"{where}: {name} is {'empty' if value in (None, '') else 'not a text'}")
    if len(value) > MOST_CHARACTERS:
        raise BadDataset(f"{where}: {name} has {len(value)} characters")
    return value


class _Opened:
    """An open parquet file. Any fault while it is open is raised as BadDataset."""

    def __init__(self, path: Path, read_dictionary: Sequence[str] = ()) -> None:
        check_size(path)
        self._path = path
        self._dictionary = list(read_dictionary)
        self._file: Any = None

    def __enter__(self) -> Any:
        try:
            self._file = pyarrow.parquet.ParquetFile(
                self._path,
                read_dictionary=self._dictionary,
                pre_buffer=False,
                arrow_extensions_enabled=False,
                thrift_string_size_limit=64 << 20,
                thrift_container_size_limit=1 << 20,
            )
        except Exception as error:
            self._explain(error)
        return self._file

    def __exit__(self, _type: object, error: BaseException | None, _trace: object) -> None:
        if self._file is not None:
            self._file.close(force=True)
        if isinstance(error, Exception):
            self._explain(error)

    def _explain(self, error: Exception) -> None:
        faults = (pyarrow.ArrowException, OSError, ValueError, OverflowError, KeyError)
        if isinstance(error, BadDataset) or not isinstance(error, faults):
            raise error
        problem = (str(error).splitlines() or [type(error).__name__])[0][:200]
        raise BadDataset(f"{self._path} is not a readable parquet file: {problem}") from error


def _check_type(path: Path, schema: Any, name: str, kind: Kind) -> None:
    at = schema.get_field_index(name)
    if at < 0:
        names = ", ".join(schema.names[:8])
        raise BadDataset(f"{path} has no column {name} (it has {names})")
    given = schema.field(at).type
    if types.is_dictionary(given):
        given = given.value_type

    def is_text(one: Any) -> bool:
        return bool(types.is_string(one) or types.is_large_string(one))

    def is_list(one: Any) -> bool:
        return bool(types.is_list(one) or types.is_large_list(one))

    fine = {
        "text": is_text(given),
        "texts": is_list(given) and is_text(given.value_type),
        "integer": types.is_integer(given),
    }
    if not fine[kind]:
        raise BadDataset(f"{path}: column {name} is {given}, not {kind}")


def _check_bounds(path: Path, about: Any, columns: Mapping[str, Kind]) -> None:
    """Check the sizes in the footer before any page is read. Raises BadDataset."""
    if about.num_row_groups > 1 << 16:
        raise BadDataset(f"{path} has {about.num_row_groups} row groups")
    size, values = dict.fromkeys(columns, 0), dict.fromkeys(columns, 0)
    for group in range(about.num_row_groups):
        row_group = about.row_group(group)
        for number in range(row_group.num_columns):
            column = row_group.column(number)
            name = column.path_in_schema.split(".")[0]
            if name in size:
                size[name] += column.total_uncompressed_size
                values[name] += column.num_values
    for name in columns:
        if not (0 <= size[name] <= _MAX_COLUMN_BYTES and 0 <= values[name] <= _MAX_VALUES):
            raise BadDataset(
                f"{path}: column {name} has {size[name]} bytes in {values[name]} values"
            )
