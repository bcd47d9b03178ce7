"""Pull GGUF files of a repository on the hub's stand-in."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from gguf import GGMLQuantizationType as Kind

from moeinf.runtime.checkpoints.checkpoint import BadCheckpoint
from moeinf.runtime.config import Settings
from moeinf.runtime.hub.download import DownloadFailed, RemoteFile
from moeinf.runtime.hub.gguf_files import has_gguf, quant_files
from moeinf.runtime.hub.listing import Repository
from moeinf.runtime.hub.resolve import find_source
from moeinf.runtime.library.library import DEMO_CHECKPOINT, Library
from moeinf.runtime.library.manifest import Manifest
from moeinf.runtime.library.repacking.repack import repack
from moeinf.runtime.names import parse_name, split_quant
from tests.conftest import ignore
from tests.gguf_files import matrices, write_gguf
from tests.hub_server import Answer, Hub, Request
from tests.runtime.gguf.test_pulls import contents
from tests.runtime.hub_pulls import serving

REPO = "Org/Demo-GGUF"

FILES = [
    "README.md", "mmproj-F16.gguf", "Some-Model.imatrix.gguf", "Some-Model-Q4_0.gguf",
    "Some-Model-Q4_K_M.gguf", "Some-Model-UD-Q4_K_XL.gguf", "Some-Model.IQ2_XXS.gguf",
    "Q8_0/Some-Model-Q8_0-00001-of-00002.gguf", "Q8_0/Some-Model-Q8_0-00002-of-00002.gguf",
    "BF16/Some-Model-BF16-00001-of-00002.gguf",
]  # fmt: skip


def listed(*paths: str) -> Repository:
    files = {path: RemoteFile(path.rpartition("/")[2], 1, "", None, None) for path in paths}
    return Repository("org/x-gguf", "0" * 40, files)


@pytest.mark.parametrize(
    ("quant", "tag", "expected"),
    [
        (None, None, FILES[4:5]),
        ("q4_0", None, FILES[3:4]),
        ("ud-q4_k_xl", None, FILES[5:6]),
        ("IQ2_XXS", None, FILES[6:7]),
        ("Q8_0", None, FILES[7:9]),
        (None, "q8", FILES[7:9]),
        (None, "mxfp4", FILES[4:5]),
    ],
)
def test_the_choice_of_files(quant: str | None, tag: str | None, expected: list[str]) -> None:
    _, files = quant_files(listed(*FILES), quant, tag)
    assert [file.name for file in files] == [path.rpartition("/")[2] for path in expected]


def test_what_is_absent_is_named() -> None:
    with pytest.raises(
        BadCheckpoint, match=r"Q9_9.* BF16, IQ2_XXS, Q4_0, Q4_K_M, Q8_0, UD-Q4_K_XL$"
    ):
        quant_files(listed(*FILES), "Q9_9", None)
    with pytest.raises(BadCheckpoint, match="00002-of-00002"):
        quant_files(listed(*FILES), "BF16", None)
    assert not has_gguf(listed(*FILES[:3]))


def test_a_quantisation_is_part_of_the_name() -> None:
    for spelling in ("hf.co/Org/X-GGUF:Q5_K_M", "org/x-gguf:q5_k_m"):
        assert str(parse_name(spelling)) == "org--x-gguf-q5_k_m:q4"
    assert split_quant("hf.co/Org/X-GGUF:UD-Q4_K_XL") == ("Org/X-GGUF", "UD-Q4_K_XL")
    assert split_quant("org/x-gguf:q8") == ("org/x-gguf:q8", None)
    assert split_quant("org/x:Q5_K_M") == ("org/x:Q5_K_M", None)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a repository with the demo as Q4_0 and, in parts in a folder, as Q8_0."""
    folder = tmp_path_factory.mktemp("repository")
    write_gguf(DEMO_CHECKPOINT, folder / "demo-Q4_0.gguf", matrices(Kind.Q4_0))
    (folder / "Q8_0").mkdir()
    write_gguf(DEMO_CHECKPOINT, folder / "Q8_0" / "demo-Q8_0.gguf", matrices(Kind.Q8_0), split=20)
    return folder


@pytest.fixture
def hub(folder: Path, tmp_path: Path) -> Iterator[Hub]:
    with serving(folder, tmp_path / "cache", REPO) as hub:
        yield hub


def pull(model: str, settings: Settings) -> Manifest:
    name, source = find_source(model, None, settings, ignore)
    return repack(source, Library(settings), name, ignore, ignore)


@pytest.mark.parametrize(("quant", "tag"), [("Q4_0", "q4"), ("q8_0", "q8")])
def test_a_pull_is_that_of_the_local_file(
    quant: str, tag: str, hub: Hub, folder: Path, tmp_path: Path
) -> None:
    settings = Settings(tmp_path / "home")
    remote = pull(f"hf.co/{REPO}:{quant}", settings)
    assert (remote.tag, remote.source) == (tag, f"hub:{REPO}:{quant.upper()}")
    path = next(folder.rglob(f"*{quant.upper()}*.gguf"))
    assert contents(remote) == contents(pull(str(path), settings))
    again, source = find_source(f"hf.co/{REPO}:{quant}", None, settings, ignore)
    assert Library(settings).made_of(again, source.origin, source.revision) == remote


@pytest.mark.parametrize(
    ("model", "name", "wanted", "file"),
    [
        (f"{REPO}:q8", "y", "y:q8", "Q8_0"),
        (f"hf.co/{REPO}:Q8_0", "y", "y:q8", "Q8_0"),
        (f"{REPO}:q8", "y:q5k", "y:q5k", "Q4_0"),  # the name's own tag decides
        (REPO, "y:latest", "y:q4", "Q4_0"),
        ("demo:q5k", "y", "y:q5k", None),
        ("demo", "y", "y:bf16", None),
    ],
)
@pytest.mark.usefixtures("hub")
def test_a_new_name_keeps_the_tag_that_was_asked_for(
    model: str, name: str, wanted: str, file: str | None, tmp_path: Path
) -> None:
    found, source = find_source(model, name, Settings(tmp_path / "home"), ignore)
    assert (str(found), source.origin) == (wanted, f"hub:{REPO}:{file}" if file else "demo")


def test_a_header_that_changed_on_the_way_is_refused(hub: Hub, tmp_path: Path) -> None:
    """The range that was read ahead lies about a number; the whole file has the right hash."""

    def lie(request: Request) -> Answer | None:
        if request.number > 0:
            return None
        return Answer(change=lambda data: data.replace(b"<|user|>", b"<|USER|>"))

    hub.fault = lie
    with pytest.raises(DownloadFailed):
        pull(f"{REPO}:Q4_0", Settings(tmp_path / "home"))


def test_a_repository_without_the_file_lists_what_it_has(hub: Hub, tmp_path: Path) -> None:
    with pytest.raises(BadCheckpoint, match="Q4_0, Q8_0"):
        find_source(f"{REPO}:Q6_K", None, Settings(tmp_path / "home"), ignore)
