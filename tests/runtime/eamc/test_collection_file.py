"""The EAMC on disk: what is read back, which processes share it, and what is refused."""

from __future__ import annotations

import json
import shutil
import stat
import zlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from moeinf.offload.format.array_file import pack
from moeinf.offload.routing.eamc import Eamc
from moeinf.offload.routing.trace import RequestEam
from moeinf.runtime.config import Settings
from moeinf.runtime.eamc.collection_file import EamcState, ForeignEamc, export_eamc, import_eamc
from moeinf.runtime.library.library import Library, NoModelUsed
from moeinf.runtime.library.manifest import Manifest
from moeinf.runtime.names import ModelName


@pytest.fixture(scope="module")
def manifest(demo_home: Path) -> Manifest:
    return Library(Settings(demo_home)).read("demo")[0]


class Kept:
    """A state in its own home, with its notes."""

    def __init__(self, home: Path, manifest: Manifest, capacity: int = 4) -> None:
        self.notes: list[str] = []
        self.settings = Settings(home)
        self.state = EamcState(self.settings, manifest, self.notes.append, capacity)
        self.path = self.settings.state_of(manifest.model) / "eamc.log"


@pytest.fixture
def kept(tmp_path: Path, manifest: Manifest) -> Kept:
    return Kept(tmp_path, manifest)


def entry(seed: int) -> RequestEam:
    draw = np.random.default_rng(seed)
    return RequestEam(
        draw.integers(0, 90_000, (6, 32), np.uint32), draw.integers(0, 9, (6, 32), np.uint32)
    )


def assert_same(eamc: Eamc, expected: list[RequestEam]) -> None:
    found = eamc.entries()
    assert len(found) == len(expected)
    for ours, theirs in zip(found, expected, strict=True):
        assert (ours.prefill == theirs.prefill).all()
        assert (ours.decode == theirs.decode).all()


def test_entries_come_back_in_order(kept: Kept, manifest: Manifest, tmp_path: Path) -> None:
    for seed in range(3):
        kept.state.append(entry(seed))
    assert_same(Kept(tmp_path, manifest).state.load(), [entry(seed) for seed in range(3)])
    assert stat.S_IMODE(kept.path.stat().st_mode) == 0o600
    assert kept.notes == []


def test_the_log_replays_to_what_adding_gives_and_stays_bounded(kept: Kept) -> None:
    """Capacity 4: the ninth entry causes a rewrite, which does not change the content."""
    expected, sizes = Eamc(4, 6, 32), []
    for seed in range(30):
        kept.state.append(entry(seed))
        expected.add(entry(seed).prefill, entry(seed).decode)
        assert_same(kept.state.load(), expected.entries())
        sizes.append(kept.path.stat().st_size)
    assert max(sizes) < 10 * sizes[0]


def test_the_live_collection_grows_with_what_is_appended(kept: Kept) -> None:
    kept.state.append(entry(0))
    live = kept.state.live()
    kept.state.append(entry(1))
    assert kept.state.live() is live
    assert_same(live, [entry(0), entry(1)])


def test_two_processes_share_one_collection(kept: Kept, manifest: Manifest, tmp_path: Path) -> None:
    other = Kept(tmp_path, manifest)
    kept.state.append(entry(0))
    other.state.append(entry(1))
    assert len(kept.state.load()) == len(other.state.load()) == 2
    assert kept.state.clear() == 2
    other.state.append(entry(2))
    assert_same(kept.state.load(), [entry(2)])


def test_a_model_of_another_shape_starts_anew(tmp_path: Path, manifest: Manifest) -> None:
    Kept(tmp_path, manifest).state.append(entry(0))
    again = Kept(tmp_path, replace(manifest, experts=64))
    assert len(again.state.load()) == 0
    (note,) = again.notes
    assert "6 layers of 32 experts, not 6 of 64: it was put aside as eamc.log.aside-1" in note
    back = Kept(tmp_path, manifest)
    assert len(back.state.load()) == 0


@pytest.mark.parametrize("header", [b"x", b"[]", b'{"kind": "eamc", "version": 9}', b'{"a": 1}'])
def test_other_headers(header: bytes, kept: Kept) -> None:
    assert kept.state._problem(header) is not None


def test_an_entry_of_another_size_is_passed_over(kept: Kept) -> None:
    kept.state.append(entry(0))
    bomb = zlib.compress(bytes(1 << 24))
    for record in (b"", b"\6\0\0\0\40\0\0\0" + bomb, b"\6\0\0\0\40\0\0\0x", b"\7\0\0\0\40\0\0\0"):
        kept.state._log.append(record or b"\0")
    assert_same(kept.state.load(), [entry(0)])


def test_export_and_import(kept: Kept, manifest: Manifest, tmp_path: Path) -> None:
    for seed in range(3):
        kept.state.append(entry(seed))
    path = tmp_path / "x.eamc"
    export_eamc(kept.state.load(), path)
    fresh = Kept(tmp_path / "b", manifest)
    fresh.state.append(entry(9))
    assert fresh.state.extend(import_eamc(path, manifest).entries()) == 4
    assert_same(fresh.state.load(), [entry(9), *(entry(seed) for seed in range(3))])
    with pytest.raises(ForeignEamc, match=r"6 layers of 32 experts; demo:bf16 has 7 of 32"):
        import_eamc(path, replace(manifest, layers=7))


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"", "is not an EAMC"),
        (b"MOEINF\r\n" + b"\xff" * 64, "is not an EAMC"),
        (b"[" * 5000, "is not an EAMC"),
        (pack("recording", 1, {}, {}), "kind 'recording'"),
        (pack("eamc", 9, {}, {}), "version 9"),
        (pack("eamc", 1, {"capacity": 1, "layers": -1, "experts": 2}, {}), "not a size"),
    ],
)
def test_files_that_are_no_eamc(
    content: bytes, problem: str, manifest: Manifest, tmp_path: Path
) -> None:
    (tmp_path / "x").write_bytes(content)
    with pytest.raises(ForeignEamc, match=problem):
        import_eamc(tmp_path / "x", manifest)


def test_a_small_file_that_inflates(manifest: Manifest, tmp_path: Path) -> None:
    """1.3 MB inflate to 1.3 GB of zeros.

    The declared shape is refused before anything inflates.
    """
    body = zlib.compress(bytes(64 << 20), 9)
    shape = [1 << 17, 6, 32]
    table = [{"name": "prefill", "dtype": "<u4", "shape": shape, "bytes": len(body), "crc32": 0}]
    about = {"capacity": 1, "layers": 6, "experts": 32}
    document = {"kind": "eamc", "version": 1, "meta": about, "arrays": table}
    header = json.dumps(document).encode()
    prefix = b"MOEINF\r\n" + len(header).to_bytes(4, "little")
    (tmp_path / "x").write_bytes(prefix + zlib.crc32(header).to_bytes(4, "little") + header + body)
    with pytest.raises(ForeignEamc, match="bytes where 25165824 are allowed"):
        import_eamc(tmp_path / "x", manifest)
    with (tmp_path / "x").open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(ForeignEamc, match="too large"):
        import_eamc(tmp_path / "x", manifest)


@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
@given(places=st.lists(st.tuples(st.integers(0, 1 << 30), st.integers(0, 255)), max_size=3))
def test_damaged_exports(places: list[tuple[int, int]], manifest: Manifest, tmp_path: Path) -> None:
    eamc = Eamc(4, 6, 32)
    eamc.add(entry(1).prefill, entry(1).decode)
    raw = bytearray(eamc.to_bytes())
    for place, value in places:
        raw[place % len(raw)] = value
    (tmp_path / "x").write_bytes(raw)
    try:
        found = import_eamc(tmp_path / "x", manifest)
    except ForeignEamc:
        return
    assert_same(found, [entry(1)])


def test_rm_takes_the_state_along_and_last_use_follows(tmp_path: Path, demo_home: Path) -> None:
    home = Settings(tmp_path)
    library = Library(home)
    shutil.copytree(demo_home / "models/demo", tmp_path / "models/demo")
    with pytest.raises(NoModelUsed):
        library.last_used()
    a, b = ModelName("demo", "bf16"), ModelName("demo", "f32")
    library.used(b)
    library.used(a)
    assert library.last_used() == a
    library.used(b)
    assert library.last_used() == b
    EamcState(home, library.read("demo:f32")[0], print).append(entry(0))
    library.remove("demo:f32")
    assert sorted(path.name for path in (tmp_path / "state/demo").iterdir()) == ["bf16"]
    assert library.last_used() == a
    library.remove("demo")
    assert not (tmp_path / "state/demo").exists()
    with pytest.raises(NoModelUsed):
        library.last_used()
