"""Local data set files, the demo's items, and hostile files."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from moeinf.runtime.jobs.datasets.items import BadDataset, Item, NoSuchDataset, Wanted
from moeinf.runtime.jobs.datasets.rows import parquet_rows
from moeinf.runtime.jobs.datasets.table import load_items
from moeinf.runtime.library.library import DEMO_CHECKPOINT
from tests.conftest import ignore


def load(dataset: str | Path, **wanted: object) -> list[Item]:
    heldout = DEMO_CHECKPOINT / "heldout.jsonl"
    return load_items(str(dataset), Wanted(**wanted), Path("nowhere"), heldout, ignore)  # type: ignore[arg-type]


def test_the_demo_deals_its_kinds_in_turn() -> None:
    items = load("demo", limit=32)
    assert set(Counter(item.task for item in items).values()) == {2}
    assert len({item.task for item in items}) == 16
    assert {item.task for item in load("demo", subset=("sort", "add"))} == {"sort", "add"}
    with pytest.raises(NoSuchDataset, match="demo has no subset 'sorting'"):
        load("demo", subset=("sorting",))


def test_text_files_give_a_prompt_per_line(tmp_path: Path) -> None:
    path = tmp_path / "x.txt"
    path.write_bytes("first\r\n\n  \nzweite Zeile ü\n".encode())
    assert load(path) == [Item("first"), Item("zweite Zeile ü")]
    assert load(path, limit=1) == [Item("first")]


def test_json_lines(tmp_path: Path) -> None:
    path = tmp_path / "x.JSONL"
    rows = [
        '"plain"',
        '{"inputs": "a", "task": "t"}',
        '{"text": "b", "kind": "k", "question": "c"}',
    ]
    path.write_text("\n".join(rows))
    assert load(path) == [Item("plain"), Item("a", "t"), Item("c", "k")]
    assert load(path, subset=("k",)) == [Item("c", "k")]
    with pytest.raises(NoSuchDataset, match="no prompt of task z"):
        load(path, subset=("z",))


def test_parquet_reads_only_the_columns_it_needs(tmp_path: Path) -> None:
    path = tmp_path / "x.parquet"
    table = pyarrow.table({"prompt": ["a", "b"], "kind": ["k", None], "image": [b"\0" * 9] * 2})
    pyarrow.parquet.write_table(table, path)
    assert load(path) == [Item("a", "k"), Item("b")]
    assert list(parquet_rows(path, {"prompt": "text"}, 1)) == [{"prompt": "a"}]
    large = pyarrow.table({"text": pyarrow.array(["x", "y"], pyarrow.large_string())})
    pyarrow.parquet.write_table(large, path, use_dictionary=False)
    assert load(path) == [Item("x"), Item("y")]


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("x.jsonl", b'{"prompt": "a"}\n{', "x.jsonl:2 is not JSON"),
        ("x.jsonl", b"[1]", "neither a JSON object nor a string"),
        ("x.jsonl", b'{"answer": "a"}', "x.jsonl:1 has none of prompt, inputs"),
        ("x.jsonl", b'{"prompt": 3}', "prompt is not a text"),
        ("x.jsonl", b'{"prompt": " "}', "prompt is not a text|empty"),
        ("x.jsonl", b"[" * 100_000, "is not JSON"),
        ("x.txt", b"ok\n\xff\xfe", "x.txt:2 is not UTF-8"),
        ("x.txt", b"", "gives no prompts"),
        ("x.txt", b"a" * (5 << 20), "longer than 4 MiB"),
        ("x.txt", b"a" * (2 << 20), "has 2097152 characters"),
        ("x.parquet", b"PAR1 what else PAR1", "not a readable parquet file"),
        ("x.parquet", b"", "not a readable parquet file"),
    ],
)
def test_files_of_another_form(name: str, content: bytes, problem: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(BadDataset, match=problem):
        load(tmp_path / name)


def test_what_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(NoSuchDataset, match=r"gone\.txt does not exist"):
        load(tmp_path / "gone.txt")
    (tmp_path / "folder.txt").mkdir()
    with pytest.raises(BadDataset, match="is not a file"):
        load(tmp_path / "folder.txt")
    with pytest.raises(NoSuchDataset, match="not one of bbh, bigbench, demo, flan, mmlu, nor a"):
        load("mmmlu")


def test_a_sparse_giant_is_not_read(tmp_path: Path) -> None:
    for ending in ("txt", "jsonl", "parquet"):
        path = tmp_path / f"x.{ending}"
        with path.open("wb") as file:
            file.truncate(1 << 40)
        with pytest.raises(BadDataset, match="1048576 MiB; at most 256"):
            load(path)


def test_few_bytes_that_unfold_into_many(tmp_path: Path) -> None:
    """Dictionary encoding stores one long value once for any number of rows."""
    path = tmp_path / "x.parquet"
    values = pyarrow.DictionaryArray.from_arrays(
        pyarrow.array([0] * 100_000, pyarrow.int32()), ["x" * (5 << 20)]
    )
    pyarrow.parquet.write_table(pyarrow.table({"prompt": values}), path, compression="zstd")
    assert path.stat().st_size < 1 << 20
    with pytest.raises(BadDataset, match="a value of prompt has 5242880 bytes"):
        load(path)
    lists = pyarrow.ListArray.from_arrays([0, 1 << 25], pyarrow.array([""] * (1 << 25)))
    pyarrow.parquet.write_table(pyarrow.table({"choices": lists}), path, compression="zstd")
    with pytest.raises(BadDataset, match="column choices has"):
        list(parquet_rows(path, {"choices": "texts"}, 1))


@pytest.fixture(scope="module")
def honest(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("parquet") / "x.parquet"
    rows = [{"prompt": f"item {i} " * 5, "task": f"t{i % 3}", "n": i} for i in range(200)]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path, row_group_size=50)
    return path.read_bytes()


@settings(
    max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_a_damaged_parquet_file_is_an_error_of_ours(
    data: st.DataObject, honest: bytes, tmp_path: Path
) -> None:
    raw = bytearray(honest)
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, len(raw) - 1))
        raw[place] = data.draw(st.integers(0, 255))
    if data.draw(st.booleans()):
        del raw[data.draw(st.integers(0, len(raw))) :]
    path = tmp_path / "x.parquet"
    path.write_bytes(raw)
    try:
        items = load(path, limit=300)
    except BadDataset:
        return
    assert all(isinstance(item.prompt, str) for item in items)


def test_json_dumps_round_trip(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    texts = ["tab\tnew\nline", "\u2028 separator", "emoji 🦉"]
    path.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    assert [item.prompt for item in load(path)] == texts
