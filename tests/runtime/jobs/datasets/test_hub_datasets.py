"""The hub's data sets, as small files of the same form, through the stand-in hub."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from huggingface_hub import constants

from moeinf.runtime.jobs.datasets.hub import DatasetUnavailable
from moeinf.runtime.jobs.datasets.items import BadDataset, Item, NoSuchDataset, Wanted
from moeinf.runtime.jobs.datasets.table import load_items
from moeinf.runtime.library.library import DEMO_CHECKPOINT
from tests.conftest import ignore
from tests.hub_server import Hub, serve

PART = "-00000-of-00001.parquet"
SUBJECTS = ("abstract_algebra", "virology")


def write(path: Path, rows: list[dict[str, object]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)


def question(subject: str, split: str, number: int) -> dict[str, object]:
    return {
        "question": f"{subject} {split} {number}?",
        "subject": subject,
        "choices": [f"{letter}{number}" for letter in "wxyz"],
        "answer": number % 4,
    }


def mmlu(folder: Path) -> None:
    for split, count in (("test", 7), ("dev", 5), ("validation", 2)):
        rows = {s: [question(s, split, i) for i in range(count)] for s in SUBJECTS}
        for subject in SUBJECTS:
            write(folder / subject / f"{split}{PART}", rows[subject])
        write(folder / "all" / f"{split}{PART}", [row for s in SUBJECTS for row in rows[s]])
    (folder / "README.md").write_text("x")


def bigbench(folder: Path) -> None:
    for task in ("anachronisms", "emoji_movie", "tense"):
        for split, count in (("train", 9), ("validation", 4)):
            rows = [
                {"inputs": f"{task} {split} {i}\nA:", "targets": ["yes"], "idx": i}
                for i in range(count)
            ]
            write(folder / task / f"{split}{PART}", rows)  # type: ignore[arg-type]


def bbh(folder: Path) -> None:
    for task in ("navigate", "word_sorting"):
        rows: list[dict[str, object]] = [{"input": f"{task} {i}", "target": "no"} for i in range(5)]
        write(folder / task / f"test{PART}", rows)


def flan(folder: Path) -> None:
    for split in ("train", "test"):
        (folder / split).mkdir(parents=True)
        for task in ("aeslc", "anli_r1"):
            items = [
                {"inputs": f"{task} {split} {i}\n\nOPTIONS:\n- Yes", "targets": "Yes", "task": task}
                for i in range(3)
            ]
            lines = "".join(json.dumps(item) + "\n" for item in items)
            (folder / split / f"{task}_10templates_{split}.jsonl").write_text(lines)


REPOSITORIES: dict[str, tuple[str, Callable[[Path], None]]] = {
    "mmlu": ("cais/mmlu", mmlu),
    "bigbench": ("tasksource/bigbench", bigbench),
    "bbh": ("SaylorTwift/bbh", bbh),
    "flan": ("Muennighoff/flan", flan),
}
Serve = Callable[[str], Hub]


@pytest.fixture
def online(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Serve]:
    """Return a function that serves a data set and points huggingface_hub at it.

    Example: online("mmlu").
    """
    with ExitStack() as stack:

        def start(name: str) -> Hub:
            repo, make = REPOSITORIES[name]
            make(tmp_path / name)
            hub = stack.enter_context(serve(Hub(repo, tmp_path / name, dataset=True)))
            monkeypatch.setattr(constants, "ENDPOINT", hub.endpoint)
            template = hub.endpoint + "/{repo_id}/resolve/{revision}/{filename}"
            monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
            return hub

        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hf"))
        yield start


def load(name: str, folder: Path, **wanted: object) -> list[Item]:
    heldout = DEMO_CHECKPOINT / "heldout.jsonl"
    return load_items(name, Wanted(**wanted), folder / "data", heldout, ignore)  # type: ignore[arg-type]


def test_the_mmlu_prompt_to_the_letter(online: Serve, tmp_path: Path) -> None:
    hub = online("mmlu")
    items = load("mmlu", tmp_path, shots=2, limit=100)
    assert Counter(item.task for item in items) == {"abstract_algebra": 7, "virology": 7}
    (item,) = (item for item in items if "abstract_algebra test 3?" in item.prompt)
    assert item.prompt == (
        "The following are multiple choice questions (with answers) about abstract algebra.\n\n"
        "abstract_algebra dev 0?\nA. w0\nB. x0\nC. y0\nD. z0\nAnswer: A\n\n"
        "abstract_algebra dev 1?\nA. w1\nB. x1\nC. y1\nD. z1\nAnswer: B\n\n"
        "abstract_algebra test 3?\nA. w3\nB. x3\nC. y3\nD. z3\nAnswer:"
    )
    assert {r.file for r in hub.requests} == {f"all/test{PART}", f"all/dev{PART}"}
    five = load("mmlu", tmp_path, limit=1)[0].prompt
    assert five.count("Answer: ") == 5
    assert load("mmlu", tmp_path, shots=0, limit=1)[0].prompt.count("Answer:") == 1


def test_mmlu_by_subject(online: Serve, tmp_path: Path) -> None:
    hub = online("mmlu")
    items = load("mmlu", tmp_path, subset=("virology",), limit=3, shots=1)
    assert [item.task for item in items] == ["virology"] * 3
    assert {r.file for r in hub.requests} == {f"virology/test{PART}", f"virology/dev{PART}"}
    with pytest.raises(NoSuchDataset, match="no subset 'viro'; the nearest of 2 are: virology"):
        load("mmlu", tmp_path, subset=("viro",))


def test_bigbench_deals_tasks_in_turn_and_fetches_no_more(online: Serve, tmp_path: Path) -> None:
    hub = online("bigbench")
    two = load("bigbench", tmp_path, limit=2)
    assert len({item.task for item in two}) == 2
    assert len({r.file for r in hub.requests}) == 2
    assert all(item.prompt.startswith(f"{item.task} validation ") for item in two)
    assert all(item.prompt.endswith("\nA:") for item in two)
    everything = load("bigbench", tmp_path, limit=100)
    assert Counter(item.task for item in everything) == dict.fromkeys(
        ("anachronisms", "emoji_movie", "tense"), 4
    )
    assert len({item.task for item in everything[:3]}) == 3


def test_the_seed_decides_the_mix(online: Serve, tmp_path: Path) -> None:
    online("bbh")
    first = load("bbh", tmp_path, limit=6, seed=1)
    assert first == load("bbh", tmp_path, limit=6, seed=1)
    assert first != load("bbh", tmp_path, limit=6, seed=2)
    assert first[:4] == load("bbh", tmp_path, limit=4, seed=1)


def test_flan_takes_the_test_split_verbatim(online: Serve, tmp_path: Path) -> None:
    online("flan")
    items = load("flan", tmp_path, limit=50)
    assert sorted(item.prompt for item in items) == sorted(
        f"{task} test {i}\n\nOPTIONS:\n- Yes" for task in ("aeslc", "anli_r1") for i in range(3)
    )
    assert load("flan", tmp_path, subset=("aeslc",), limit=1)[0].task == "aeslc"


def test_a_second_time_nothing_is_fetched_and_without_the_hub_it_still_works(
    online: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = online("bbh")
    first = load("bbh", tmp_path, limit=10)
    hub.requests.clear()
    assert load("bbh", tmp_path, limit=10) == first
    assert hub.requests == []
    hub.gate = 500
    assert load("bbh", tmp_path, limit=10) == first
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:1")
    assert load("bbh", tmp_path, limit=10) == first


def test_the_hugging_face_cache_is_used_in_place(
    online: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot = tmp_path / "hf/datasets--SaylorTwift--bbh/snapshots" / ("a" * 40)
    bbh(snapshot)
    refs = snapshot.parents[1] / "refs"
    refs.mkdir()
    (refs / "main").write_text("a" * 40)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:1")
    assert len(load("bbh", tmp_path, limit=50)) == 10
    assert not (tmp_path / "data").exists()


def test_absent_and_unreachable(
    online: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = online("bbh")
    hub.gate = 404
    with pytest.raises(DatasetUnavailable, match="no repository the data set SaylorTwift/bbh"):
        load("bbh", tmp_path)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:1")
    with pytest.raises(DatasetUnavailable, match="cannot be reached for the data set Sayl"):
        load("bbh", tmp_path)


@pytest.mark.parametrize(
    ("rows", "problem"),
    [
        ([{"question": "q", "subject": "s", "choices": ["a"], "answer": 0}], "4 choices"),
        ([{**question("s", "test", 0), "answer": 4}], "the answer is 4"),
        ([{**question("s", "test", 0), "question": ""}], "question is empty"),
        ([{**question("s", "test", 0), "question": 3}], "question is int64, not text"),
        ([{**question("s", "test", 0), "choices": "abcd"}], "choices is string, not texts"),
        ([{"question": "q"}], "no column"),
    ],
)
def test_rows_of_another_form(
    rows: list[dict[str, object]], problem: str, online: Serve, tmp_path: Path
) -> None:
    hub = online("mmlu")
    write(hub.folder / "all" / f"test{PART}", rows)
    with pytest.raises(BadDataset, match=problem):
        load("mmlu", tmp_path)


def test_names_in_a_listing_cannot_leave_the_folder(online: Serve, tmp_path: Path) -> None:
    hub = online("bbh")
    about = hub.info()
    siblings = about["siblings"]
    assert isinstance(siblings, list)
    evil = {"rfilename": f"../../evil/test{PART}", "size": 4, "blobId": "0" * 40}
    hub.info = lambda: {**about, "siblings": [*siblings, evil]}  # type: ignore[method-assign]
    items = load("bbh", tmp_path, limit=100)
    assert {item.task for item in items} == {"navigate", "word_sorting"}
    assert not (tmp_path / "evil").exists()


def test_a_file_too_large_is_not_fetched(online: Serve, tmp_path: Path) -> None:
    hub = online("bbh")
    about = hub.info()
    siblings = about["siblings"]
    assert isinstance(siblings, list)
    large = [{**entry, "size": 1 << 40} for entry in siblings]
    hub.info = lambda: {**about, "siblings": large}  # type: ignore[method-assign]
    with pytest.raises(BadDataset, match="has 1048576 MiB"):
        load("bbh", tmp_path)
    assert hub.requests == []
