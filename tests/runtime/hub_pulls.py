"""Pull a small checkpoint from the stand-in for the hub, in this process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

from moeinf.runtime.config import Settings
from moeinf.runtime.hub.resolve import find_source
from moeinf.runtime.library.library import Library
from moeinf.runtime.library.manifest import Manifest
from moeinf.runtime.library.repacking.repack import repack
from scripts.make_checkpoint import config, make_checkpoint
from tests.hub_server import Hub, serve

REPO = "Org/Small"
MODEL = f"{REPO}:bf16"


def write_repository(folder: Path) -> list[str]:
    """Write a checkpoint whose experts straddle files; return the names of these files."""
    make_checkpoint(folder, config(1, 4, 64, 48, 2), file_bytes=30_000)
    (folder / "README.md").write_text("a model")
    return sorted(path.name for path in folder.glob("*.safetensors"))


@contextmanager
def serving(folder: Path, cache: Path, repo: str = REPO) -> Iterator[Hub]:
    """Serve a repository, and point huggingface_hub at it."""
    with serve(Hub(repo, folder)) as hub:
        files = hub.endpoint + "/{repo_id}/resolve/{revision}/{filename}"
        at = "huggingface_hub.constants"
        with (
            mock.patch(f"{at}.ENDPOINT", hub.endpoint),
            mock.patch(f"{at}.HUGGINGFACE_CO_URL_TEMPLATE", files),
            mock.patch(f"{at}.HF_HUB_CACHE", str(cache)),
        ):
            yield hub


def pull(home: Path, notes: list[str] | None = None) -> Manifest:
    """Pull the repository into a home, like `moeinf pull`."""
    note = (notes if notes is not None else []).append
    settings = Settings(home)
    name, source = find_source(MODEL, None, settings, note)
    return repack(source, Library(settings), name, lambda *_: None, note)


def shas(manifest: Manifest) -> dict[str, str]:
    """Return the hash of each file of a model, to compare it with a clean pull."""
    return {file.path: file.sha256 for file in manifest.files}
