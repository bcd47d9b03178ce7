"""A hub's answers are checked before use; here the stand-in sends some wrong ones.

The same pulls are also interrupted, and bytes change before they resume.
"""

from __future__ import annotations

import gzip
import json
import struct
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from moeinf.runtime.checkpoints.checkpoint import BadCheckpoint
from moeinf.runtime.config import Settings
from moeinf.runtime.hub.download import DownloadFailed
from moeinf.runtime.hub.listing import RepositoryError, look_up
from moeinf.runtime.library.library import Library
from moeinf.runtime.library.staging import downloads_of, partial_folder
from moeinf.runtime.library.verify import verify
from moeinf.runtime.names import ModelName
from tests.hub_server import Answer, Hub, Request, dumped
from tests.runtime.hub_pulls import REPO, pull, serving, shas, write_repository

Entry = dict[str, Any]
NAME = ModelName("org--small", "bf16")


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    write_repository(tmp_path / "repository")
    with serving(tmp_path / "repository", tmp_path / "cache") as hub:
        yield hub


@pytest.fixture
def weights(hub: Hub) -> list[str]:
    return sorted(path.name for path in hub.folder.glob("*.safetensors"))


@pytest.fixture
def clean(hub: Hub, tmp_path: Path) -> dict[str, str]:
    """Return the hashes of a pull without faults."""
    found = shas(pull(tmp_path / "clean"))
    hub.requests.clear()
    return found


def partial(home: Path) -> Path:
    return partial_folder(Library(Settings(home)).folder(NAME))


def swapped(text: bytes) -> bytes:
    """Swap two tensors of the same form in a header."""
    header = json.loads(text)
    by_form: dict[str, str] = {}
    for name, about in header.items():
        form = json.dumps([about.get("dtype"), about.get("shape")])
        if form in by_form:
            other = header[by_form[form]]
            about["data_offsets"], other["data_offsets"] = (
                other["data_offsets"],
                about["data_offsets"],
            )
            break
        by_form[form] = name
    changed = json.dumps(header, separators=(",", ":")).encode()
    assert len(changed) <= len(text)
    assert json.loads(changed) != json.loads(text)
    return changed.ljust(len(text))


def test_a_header_that_is_another_in_its_own_answer(
    hub: Hub, weights: list[str], tmp_path: Path
) -> None:
    hub.fault = lambda r: Answer(change=swapped) if r.file == weights[1] and r.start == 8 else None
    with pytest.raises(DownloadFailed, match=weights[1]):
        pull(tmp_path / "home")
    assert Library(Settings(tmp_path / "home")).installed() == []
    hub.fault = lambda _: None
    assert verify_all(tmp_path / "home") == []


def verify_all(home: Path) -> list[str]:
    manifest = pull(home)
    folder = Library(Settings(home)).folder(manifest.model)
    return [damage.path for damage in verify(folder, manifest, lambda *_: None)]


@pytest.mark.parametrize(
    ("file", "old", "new"),
    [
        ("config.json", b"10000.0", b"20000.0"),
        ("model.safetensors.index.json", b'"total_size": ', b'"total_sizf": '),
        ("tokenizer.json", b"\n", b" "),
    ],
)
def test_small_files_have_the_hash_that_was_promised(
    file: str, old: bytes, new: bytes, hub: Hub, tmp_path: Path
) -> None:
    def change(data: bytes) -> bytes:
        assert old in data
        return data.replace(old, new)

    hub.fault = lambda r: Answer(change=change) if r.file == file else None
    with pytest.raises(DownloadFailed, match="does not have the hash"):
        pull(tmp_path / "home")


# Sizes.


def test_answers_that_are_compressed_are_not_unpacked(hub: Hub) -> None:
    body = gzip.compress(dumped(hub.info())[:-1] + b" " * (64 << 20) + b"}", 1)
    for status in (200, 404, 500):
        hub.says = lambda _, status=status: (status, {"Content-Encoding": "gzip"}, body)  # type: ignore[misc]
        tracemalloc.start()
        try:
            with pytest.raises(RepositoryError):
                look_up(REPO, None, None)
            assert tracemalloc.get_traced_memory()[1] < 16 << 20
        finally:
            tracemalloc.stop()


def test_long_answers_are_cut_off(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    assert look_up(REPO, None, None).files
    monkeypatch.setattr("moeinf.runtime.hub.http.MAX_BODY_BYTES", 500)
    with pytest.raises(RepositoryError, match="more than 500 bytes"):
        look_up(REPO, None, None)


def test_a_large_config_is_not_fetched(hub: Hub, tmp_path: Path) -> None:
    (hub.folder / "config.json").write_bytes(b"[" + b"[]," * (2 << 20) + b"[]]")
    with pytest.raises(BadCheckpoint, match=r"config\.json is too large"):
        pull(tmp_path / "home")
    assert "config.json" not in {request.file for request in hub.requests}


def test_a_large_header_is_not_built(hub: Hub, weights: list[str], tmp_path: Path) -> None:
    text = b'{"a":[' + b"[]," * (3 << 20) + b"[]]}"
    (hub.folder / weights[0]).write_bytes(struct.pack("<Q", len(text)) + text)
    tracemalloc.start()
    try:
        with pytest.raises(BadCheckpoint, match=weights[0]):
            pull(tmp_path / "home")
        assert tracemalloc.get_traced_memory()[1] < 64 << 20
    finally:
        tracemalloc.stop()


# An interrupted pull resumes.


def interrupt(hub: Hub, home: Path, file: str) -> None:
    """Pull until the weights of `file` are requested."""
    hub.fault = lambda r: (
        Answer(status=404) if r.file == file and r.start == 0 and r.stop > 8 else None
    )
    with pytest.raises(DownloadFailed):
        pull(home)
    hub.fault = lambda _: None
    hub.requests.clear()


def asked(hub: Hub) -> set[str]:
    """Return the files of which more than the header was requested."""
    return {r.file for r in hub.requests if r.start == 0 and r.stop > 8}


def test_parts_that_change_meanwhile_are_made_again(
    hub: Hub, weights: list[str], clean: dict[str, str], tmp_path: Path
) -> None:
    home = tmp_path / "home"
    interrupt(hub, home, weights[2])
    parts = sorted(partial(home).rglob("*.parts"))
    assert parts
    for path in parts:
        data = bytearray(path.read_bytes())
        at = next(n for n in range(4096, len(data)) if data[n])
        data[at] ^= 0xFF
        path.write_bytes(data + b"more")
    assert shas(pull(home)) == clean
    assert weights[0] in asked(hub) or weights[1] in asked(hub)


def test_whole_source_files_that_change_meanwhile_come_again(
    hub: Hub, weights: list[str], clean: dict[str, str], tmp_path: Path
) -> None:
    home = tmp_path / "home"
    interrupt(hub, home, weights[2])
    source = partial(home) / "source"
    for name in (weights[2], "tokenizer.json"):
        data = bytearray((hub.folder / name).read_bytes())
        data[-5] ^= 1
        (source / name).write_bytes(data)
    assert shas(pull(home)) == clean
    assert {weights[2], "tokenizer.json"} <= asked(hub)


def test_a_commit_that_changes_the_readme_goes_on(
    hub: Hub, weights: list[str], clean: dict[str, str], tmp_path: Path
) -> None:
    home = tmp_path / "home"
    interrupt(hub, home, weights[2])
    (hub.folder / "README.md").write_text("another text")
    hub.commit = hub.commit[::-1]
    manifest = pull(home)
    assert (manifest.revision, shas(manifest)) == (hub.commit, clean)
    assert weights[0] not in asked(hub)


def test_a_commit_that_changes_weights_starts_again(
    hub: Hub, weights: list[str], tmp_path: Path
) -> None:
    home = tmp_path / "home"
    interrupt(hub, home, weights[2])
    data = bytearray((hub.folder / weights[3]).read_bytes())
    data[-5] ^= 1
    (hub.folder / weights[3]).write_bytes(data)
    hub.commit = hub.commit[::-1]
    pull(home)
    assert weights[0] in asked(hub)


def test_a_damaged_file_in_the_cache_comes_from_the_hub(
    hub: Hub, weights: list[str], clean: dict[str, str], tmp_path: Path
) -> None:
    cache = tmp_path / "cache/models--Org--Small"
    (cache / "blobs").mkdir(parents=True)
    (cache / "snapshots" / hub.commit).mkdir(parents=True)
    (cache / "refs").mkdir()
    (cache / "refs/main").write_text(hub.commit)
    damaged = (weights[1], "config.json", "tokenizer.json")
    for number, path in enumerate(hub.folder.iterdir()):
        data = bytearray(path.read_bytes())
        if path.name in damaged:
            data[-5] ^= 1
        (cache / "blobs" / f"{number}").write_bytes(data)
        (cache / "snapshots" / hub.commit / path.name).symlink_to(f"../../blobs/{number}")
    notes: list[str] = []
    home = tmp_path / "home"
    assert shas(pull(home, notes)) == clean
    assert asked(hub) == set(damaged)
    assert [note for note in notes if weights[1] in note and "damaged" in note]
    assert not downloads_of(Library(Settings(home)).folder(NAME)).exists()
    assert all(path.exists() for path in (cache / "snapshots" / hub.commit).iterdir())


# Answers of invalid form.


@pytest.mark.parametrize(
    "headers", [{}, {"Location": "ftp://x/y"}, {"Location": "http://[::1"}, {"Location": ""},
                {"Location": "http://x:99999/"}]
)  # fmt: skip
def test_redirects_that_lead_nowhere(headers: dict[str, str], hub: Hub, tmp_path: Path) -> None:
    hub.fault = lambda _: Answer(status=302, headers=headers)
    with pytest.raises(DownloadFailed, match="redirect"):
        pull(tmp_path / "home")
    hub.says = lambda _: (302, headers, b"")
    with pytest.raises(RepositoryError, match="redirect"):
        look_up(REPO, None, None)


def entry_of(info: dict[str, Any], name: str) -> Entry:
    found: Entry = next(e for e in info["siblings"] if e["rfilename"] == name)
    return found


@pytest.mark.parametrize("odd", [7, {}, [], "", "zz", "a" * 41, True, 1e308, {"x": "a" * 40}])
@pytest.mark.parametrize("key", ["blobId", "sha256"])
def test_hashes_of_an_odd_kind(key: str, odd: object, hub: Hub, weights: list[str]) -> None:
    def says(info: dict[str, Any]) -> tuple[int, dict[str, str], bytes]:
        entry = entry_of(info, weights[0] if key == "sha256" else "config.json")
        (entry["lfs"] if key == "sha256" else entry)[key] = odd
        return 200, {}, dumped(info)

    hub.says = says
    with pytest.raises(RepositoryError, match="the hub gives"):
        look_up(REPO, None, None)


def nested(info: dict[str, Any]) -> bytes:
    text = dumped(info)
    return text[:-1] + b', "cardData": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"


def bad_listings() -> dict[str, Callable[[dict[str, Any]], bytes]]:
    return {
        "nested": nested,
        "not JSON": lambda _: b"{",
        "no object": lambda _: b"[]",
        "no commit": lambda info: dumped({**info, "sha": None}),
        "files are a number": lambda info: dumped({**info, "siblings": 7}),
        "many values": lambda info: dumped(info)[:-1] + b', "x": [' + b"1," * (3 << 20) + b"1]}",
        "duplicate key": lambda info: dumped(info)[:-1] + b', "sha": "x"}',
    }


@pytest.mark.parametrize("case", sorted(bad_listings()))
def test_bad_listings(case: str, hub: Hub) -> None:
    hub.says = lambda info: (200, {}, bad_listings()[case](info))
    with pytest.raises(RepositoryError):
        look_up(REPO, None, None)


def test_files_without_a_promised_hash_are_announced(
    hub: Hub, weights: list[str], clean: dict[str, str], tmp_path: Path
) -> None:
    def says(info: dict[str, Any]) -> tuple[int, dict[str, str], bytes]:
        del entry_of(info, weights[0])["lfs"]
        del entry_of(info, weights[0])["blobId"]
        return 200, {}, dumped(info)

    hub.says = says
    notes: list[str] = []
    assert shas(pull(tmp_path / "home", notes)) == clean
    assert [note for note in notes if weights[0] in note and "no hash" in note]
    pull(tmp_path / "other")

    def flip(request: Request) -> Answer | None:
        """Flip a header byte: only the header can be compared with the first read."""
        whole = request.file == weights[0] and request.start == 0 and request.stop > 8
        return Answer(flip_at=20) if whole else None

    hub.fault = flip
    with pytest.raises(DownloadFailed, match="header"):
        pull(tmp_path / "third")
