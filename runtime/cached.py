"""Repositories whose weights the Hugging Face cache holds: nothing large is fetched for them.

Does not know what becomes of them. Other programs keep in the cache what they needed, often the
weights alone: what is absent there is not absent from the repository.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from huggingface_hub import try_to_load_from_cache

from moeinf.runtime.checkpoint import (
    CONFIG,
    QUANTISED,
    BadCheckpoint,
    Checkpoint,
    read_json,
    with_quantised,
)
from moeinf.runtime.download import Fetcher
from moeinf.runtime.hub import Repository, bring_small, small_files_of
from moeinf.runtime.repack import CONVERTED_FILES, KEPT_FILES, LocalSource
from moeinf.runtime.tokenizer import TOKENIZER
from moeinf.runtime.torch_file import open_folder


def cached_checkpoint(name: str, revision: str | None) -> Checkpoint | None:
    """A repository of which the Hugging Face cache holds config and weights, to be used in place.

    Other small files may be missing from its folder.
    """
    found = try_to_load_from_cache(name, CONFIG, revision=revision)
    if not isinstance(found, str):
        return None
    try:
        return open_folder(Path(found).parent)
    except BadCheckpoint:
        return None


class CachedSource(LocalSource):
    """Weights in the Hugging Face cache; small files, too, unless it lacks some of them."""

    def __init__(
        self, checkpoint: Checkpoint, repository: Repository, folder: Path, fetcher: Fetcher
    ) -> None:
        """folder: where small files go, a part of a workplace."""
        beside = repository.files.get(QUANTISED)
        if beside is not None and not (checkpoint.folder / QUANTISED).is_file():
            path = bring_small(fetcher, [beside], folder) / QUANTISED
            config = with_quantised(dict(checkpoint.config), read_json(path))
            checkpoint = replace(checkpoint, config=config)
        super().__init__(checkpoint, f"hub:{repository.name}", repository.commit)
        self._small = small_files_of(repository)
        self._folder, self._fetcher = folder, fetcher

    def small_files(self) -> Path:
        """Raises DownloadFailed."""
        here = self.checkpoint.folder
        if all((here / file.name).is_file() for file in self._small):
            return here
        return bring_small(self._fetcher, self._small, self._folder)


def lacking(folder: Path) -> list[str]:
    """The small files that a folder does not have, whether its repository has them or not."""
    converts = any((folder / name).is_file() for name in CONVERTED_FILES)
    wanted = (name for name in KEPT_FILES if name != TOKENIZER or not converts)
    return [name for name in wanted if not (folder / name).is_file()]
