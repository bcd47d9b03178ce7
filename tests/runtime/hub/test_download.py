"""Download files from a server that stalls, truncates, corrupts, refuses and redirects."""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from moeinf.runtime.hub import download
from moeinf.runtime.hub.download import (
    PIECE_BYTES,
    DownloadFailed,
    Fetcher,
    RemoteFile,
    fetch,
    fetch_bytes,
)
from moeinf.runtime.hub.patience import Patience
from tests.hub_server import COMMIT, Answer, Hub, Request, serve

DATA = hashlib.shake_128(b"weights").digest(5 * PIECE_BYTES + 777)


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    folder = tmp_path / "repo"
    folder.mkdir()
    (folder / "x.bin").write_bytes(DATA)
    with serve(Hub("org/m", folder)) as hub:
        yield hub


def remote(hub: Hub, sha256: str | None = "right") -> RemoteFile:
    url = f"{hub.endpoint}/org/m/resolve/{COMMIT}/x.bin"
    promised = hashlib.sha256(DATA).hexdigest() if sha256 == "right" else sha256
    return RemoteFile("x.bin", len(DATA), url, promised, None)


def fetcher(hub: Hub, waits: list[float] | None = None, token: str | None = None) -> Fetcher:
    waits = [] if waits is None else waits
    return Fetcher(hub.endpoint, token, Patience(4, 1.0, 0.5, lambda _, wait: waits.append(wait)))


def once(answer: Answer) -> Iterator[Answer | None]:
    yield answer
    while True:
        yield None


def get(hub: Hub, folder: Path, workers: int = 1, **options: object) -> list[int]:
    """Download x.bin and check it; return the progress values."""
    folder.mkdir(exist_ok=True)
    told: list[int] = []
    path = fetch(fetcher(hub, **options), remote(hub), folder, workers, told.append)  # type: ignore[arg-type]
    assert path.read_bytes() == DATA
    assert sum(told) == len(DATA)
    assert sorted(p.name for p in folder.iterdir()) == ["x.bin"]
    return told


def test_a_whole_file(hub: Hub, tmp_path: Path) -> None:
    get(hub, tmp_path / "out", workers=4)
    get(hub, tmp_path / "out")  # the file is complete: nothing is requested again
    assert len(hub.requests) == 1


def test_the_token_stays_at_home(hub: Hub, tmp_path: Path) -> None:
    get(hub, tmp_path / "out", token="secret")
    assert hub.tokens == {"hub": {"Bearer secret"}, "files": {None}}


@pytest.mark.parametrize(
    "answer",
    [
        Answer(cut_after=2 * PIECE_BYTES + 5),
        Answer(cut_after=0),
        Answer(status=500),
        Answer(status=503),
    ],
)
def test_what_breaks_once_goes_on(answer: Answer, hub: Hub, tmp_path: Path) -> None:
    answers = once(answer)
    hub.fault = lambda _: next(answers)
    waits: list[float] = []
    get(hub, tmp_path / "out", waits=waits)
    assert len(hub.requests) == 2
    assert hub.bytes_sent("x.bin") == len(DATA)  # no byte is sent twice
    assert len(waits) == 1


def test_a_stalled_connection_is_given_up(hub: Hub, tmp_path: Path) -> None:
    release = threading.Event()
    answers = once(Answer(cut_after=PIECE_BYTES, stall=release))
    hub.fault = lambda _: next(answers)
    try:
        get(hub, tmp_path / "out")
    finally:
        release.set()
    assert [r.start for r in hub.requests] == [0, PIECE_BYTES]


@pytest.mark.parametrize(("header", "waited"), [("7", 7.0), ("0", 0.0), ("100000", 60.0)])
def test_retry_after_is_obeyed(header: str, waited: float, hub: Hub, tmp_path: Path) -> None:
    answers = once(Answer(status=429, headers={"Retry-After": header}))
    hub.fault = lambda _: next(answers)
    waits: list[float] = []
    get(hub, tmp_path / "out", waits=waits)
    assert waits == [waited]


def test_waits_grow_and_patience_ends(hub: Hub, tmp_path: Path) -> None:
    hub.fault = lambda _: Answer(status=502)
    waits: list[float] = []
    with pytest.raises(DownloadFailed, match=r"x\.bin: the server answers 502, 4 times in a row"):
        get(hub, tmp_path / "out", waits=waits)
    assert len(hub.requests) == 4
    assert waits[0] <= 1 < waits[1] * 2
    assert all(0.5 <= wait / (0.5 * 2 ** (n + 1)) <= 1 for n, wait in enumerate(waits))


def test_patience_in_memory_ends_with_the_last_attempt(hub: Hub) -> None:
    hub.fault = lambda _: Answer(status=502)
    waits: list[float] = []
    with pytest.raises(DownloadFailed, match=r"x\.bin: the server answers 502, 4 times in a row"):
        fetch_bytes(fetcher(hub, waits), remote(hub), 100, 116)
    assert (len(hub.requests), len(waits)) == (4, 3)


def test_stopping_ends_a_wait(hub: Hub, tmp_path: Path) -> None:
    """The server asks for a minute's wait; stop ends the wait of another thread."""
    stopped = Fetcher(hub.endpoint, None, Patience())

    def stop_soon(_: Request) -> Answer:
        threading.Timer(0.2, stopped.stop.set).start()
        return Answer(status=429, headers={"Retry-After": "60"})

    hub.fault = stop_soon
    begin = time.monotonic()
    with pytest.raises(DownloadFailed, match=r"x\.bin: stopped"):
        fetch(stopped, remote(hub), tmp_path, 2, lambda _: None)
    with pytest.raises(DownloadFailed, match=r"x\.bin: stopped"):
        fetch_bytes(stopped, remote(hub), 0, 16)
    assert len(hub.requests) == 1
    assert time.monotonic() - begin < 10


def test_the_first_failure_ends_what_other_ranges_wait_for(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(download, "RANGE_BYTES", PIECE_BYTES)
    busy = Answer(status=503, headers={"Retry-After": "60"})
    hub.fault = lambda r: Answer(status=404) if r.start == PIECE_BYTES else busy
    begin = time.monotonic()
    with pytest.raises(DownloadFailed, match="the server answers 404"):
        fetch(Fetcher(hub.endpoint, None, Patience()), remote(hub), tmp_path, 8, lambda _: None)
    assert time.monotonic() - begin < 10


@pytest.mark.parametrize("status", [401, 403, 404, 416])
def test_refusals_end_at_once(status: int, hub: Hub, tmp_path: Path) -> None:
    hub.fault = lambda _: Answer(status=status)
    with pytest.raises(DownloadFailed, match=f"x.bin: the server answers {status}"):
        get(hub, tmp_path / "out")
    assert len(hub.requests) == 1


def test_a_server_that_ignores_ranges(hub: Hub, tmp_path: Path) -> None:
    hub.fault = lambda _: Answer(ignore_range=True)
    get(hub, tmp_path / "out")
    (tmp_path / "out/x.bin").unlink()
    answers = once(Answer(cut_after=PIECE_BYTES))
    hub.fault = lambda request: next(answers) or Answer(ignore_range=request.start > 0)
    with pytest.raises(DownloadFailed, match="got status 200"):
        get(hub, tmp_path / "out")


def test_a_rerun_fetches_no_finished_byte_twice(hub: Hub, tmp_path: Path) -> None:
    """The state equals that after kill -9: pieces and journal exist, and no cleanup has run."""
    out = tmp_path / "out"
    out.mkdir()
    hub.fault = lambda _: Answer(cut_after=3 * PIECE_BYTES + 9) if not hub.sent else Answer(404)
    with pytest.raises(DownloadFailed):
        get(hub, out)
    assert {p.name for p in out.iterdir()} == {"x.bin.incomplete", "x.bin.pieces"}
    hub.fault = lambda _: None
    told = get(hub, out)
    assert told[0] == 3 * PIECE_BYTES + 9
    assert hub.bytes_sent("x.bin") == len(DATA)


def test_a_torn_journal_and_damaged_pieces_are_fetched_again(hub: Hub, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    hub.fault = lambda _: Answer(cut_after=3 * PIECE_BYTES) if not hub.sent else Answer(404)
    with pytest.raises(DownloadFailed):
        get(hub, out)
    with (out / "x.bin.incomplete").open("r+b") as file:
        file.seek(PIECE_BYTES + 1)
        file.write(b"\0\0\0\0")
    with (out / "x.bin.pieces").open("a") as file:
        file.write(f"nonsense\n-5 3 1\n0 {1 << 60} 1\n{4 * PIECE_BYTES} 10")
    hub.fault = lambda _: None
    hub.requests.clear()
    get(hub, out, workers=2)
    assert sorted((r.start, r.stop) for r in hub.requests) == [
        (PIECE_BYTES, 2 * PIECE_BYTES),
        (3 * PIECE_BYTES, len(DATA)),
    ]


def test_corruption_on_the_way_is_fetched_once_more(hub: Hub, tmp_path: Path) -> None:
    answers = once(Answer(flip_at=1234))
    hub.fault = lambda _: next(answers)
    get(hub, tmp_path / "out")
    assert len(hub.requests) == 2


def test_a_file_that_is_not_what_was_promised(hub: Hub, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    with pytest.raises(DownloadFailed, match="does not have the hash"):
        fetch(fetcher(hub), remote(hub, "0" * 64), out, 2, lambda _: None)
    assert list(out.iterdir()) == []


def test_git_hashes_are_checked_too(hub: Hub, tmp_path: Path) -> None:
    sha1 = hashlib.sha1(b"blob %d\0" % len(DATA) + DATA).hexdigest()
    about = remote(hub, None)
    fine = RemoteFile(about.name, about.size_bytes, about.url, None, sha1)
    assert fetch(fetcher(hub), fine, tmp_path, 1, lambda _: None).read_bytes() == DATA
    (tmp_path / "x.bin").unlink()
    wrong = RemoteFile(about.name, about.size_bytes, about.url, None, "0" * 40)
    with pytest.raises(DownloadFailed, match="does not have the hash"):
        fetch(fetcher(hub), wrong, tmp_path, 1, lambda _: None)


def test_short_ranges_in_memory(hub: Hub) -> None:
    answers = once(Answer(cut_after=3))
    hub.fault = lambda _: next(answers)
    assert fetch_bytes(fetcher(hub), remote(hub), 100, 116) == DATA[100:116]


def test_endless_redirects(hub: Hub) -> None:
    hub.files_host = hub.endpoint
    with pytest.raises(DownloadFailed, match="redirects"):
        fetch_bytes(fetcher(hub), remote(hub), 0, 8)


def test_fault_sees_requests(hub: Hub) -> None:
    seen: list[Request] = []
    hub.fault = seen.append  # type: ignore[assignment]
    fetch_bytes(fetcher(hub), remote(hub), 5, 9)
    assert [(r.file, r.start, r.stop) for r in seen] == [("x.bin", 5, 9)]
