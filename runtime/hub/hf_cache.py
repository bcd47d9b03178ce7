"""Find repositories in the Hugging Face cache, so that their weights need no download.

Other programs cache only the files that they needed, often the weights alone. A file that is absent
here may exist in the repository.
"""

from __future__ import annotations

from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from huggingface_hub import constants

from moeinf.runtime.checkpoints.checkpoint import BadCheckpoint, Checkpoint
from moeinf.runtime.checkpoints.torch_bin import open_folder
from moeinf.runtime.files.regular import read_regular
from moeinf.runtime.gguf.checkpoint import open_gguf
from moeinf.runtime.gguf.reader import SUFFIX
from moeinf.runtime.hub.download import RemoteFile
from moeinf.runtime.hub.gguf_files import quant_files
from moeinf.runtime.hub.listing import Repository, is_plain
from moeinf.runtime.library.sources import CONVERTED_FILES, KEPT_FILES
from moeinf.runtime.text.tokenizer import TOKENIZER

_MOST_FILES = 10_000


def cached_snapshot(name: str, revision: str | None) -> Path | None:
    """Return the cache folder of a repository at one revision, or None.

    revision: a commit, or a branch that the cache knows; None is main.
    """
    place = Path(constants.HF_HUB_CACHE) / f"models--{name.replace('/', '--')}"
    revision = revision or constants.DEFAULT_REVISION
    if not is_plain(revision):
        return None
    with suppress(OSError, UnicodeDecodeError):
        revision = read_regular(place / "refs" / revision, 256).decode("ascii").strip()
    folder = place / "snapshots" / revision
    return folder if is_plain(revision) and folder.is_dir() else None


class CachedGguf(NamedTuple):
    """A GGUF file in the cache: its headers, its quantisation's name, and the commit."""

    checkpoint: Checkpoint
    quant: str
    commit: str


def cached_gguf(
    name: str, revision: str | None, quant: str | None, tag: str | None
) -> CachedGguf | None:
    """Return a GGUF file of a repository in the cache, to use in place, or None.

    Files may be in subfolders. quant, tag: see quant_files. Raises BadCheckpoint for a damaged
    file, and if the cache has other quantisations only.
    """
    folder = cached_snapshot(name, revision)
    paths = [] if folder is None else _files_below(folder)
    files = {
        path: RemoteFile(path.rpartition("/")[2], 0, "", None, None, path)
        for path in paths
        if path.lower().endswith(SUFFIX)
    }
    if folder is None or not files:
        return None
    try:
        quant, parts = quant_files(Repository(name, folder.name, files), quant, tag)
    except BadCheckpoint as error:
        raise BadCheckpoint(f"in the Hugging Face cache, {error}") from None
    return CachedGguf(open_gguf(folder / parts[0].path), quant, folder.name)


def _files_below(folder: Path) -> list[str]:
    """Return the paths of the files in a folder and its subfolders, of bounded number."""
    found = (str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    return list(islice(found, _MOST_FILES))


def cached_checkpoint(name: str, revision: str | None) -> Checkpoint | None:
    """Return a repository whose config and weights are in the cache, to use in place, or None.

    Other small files may be missing from its folder. The files' hashes are not checked.
    """
    folder = cached_snapshot(name, revision)
    try:
        return None if folder is None else open_folder(folder)
    except BadCheckpoint:
        return None


def lacking(folder: Path) -> list[str]:
    """Return the names of small files that a folder lacks; its repository may lack them too."""
    converts = any((folder / name).is_file() for name in CONVERTED_FILES)
    wanted = (name for name in KEPT_FILES if name != TOKENIZER or not converts)
    return [name for name in wanted if not (folder / name).is_file()]
