"""Repositories that the Hugging Face cache holds: nothing large is fetched for them.

Does not know what becomes of them. Other programs keep in the cache what they needed, often the
weights alone: what is absent there is not absent from the repository.
"""

from __future__ import annotations

from pathlib import Path

from huggingface_hub import try_to_load_from_cache

from moeinf.runtime.checkpoints.checkpoint import CONFIG, BadCheckpoint, Checkpoint
from moeinf.runtime.checkpoints.torch_bin import open_folder
from moeinf.runtime.library.repack import CONVERTED_FILES, KEPT_FILES
from moeinf.runtime.text.tokenizer import TOKENIZER


def cached_snapshot(name: str, revision: str | None) -> Path | None:
    """The folder in the Hugging Face cache with files of a repository at one revision."""
    found = try_to_load_from_cache(name, CONFIG, revision=revision)
    return Path(found).parent if isinstance(found, str) else None


def cached_checkpoint(name: str, revision: str | None) -> Checkpoint | None:
    """A repository of which the Hugging Face cache holds config and weights, to be used in place.

    Other small files may be missing from its folder. Nothing tells whether its files are whole.
    """
    folder = cached_snapshot(name, revision)
    try:
        return None if folder is None else open_folder(folder)
    except BadCheckpoint:
        return None


def lacking(folder: Path) -> list[str]:
    """The small files that a folder does not have, whether its repository has them or not."""
    converts = any((folder / name).is_file() for name in CONVERTED_FILES)
    wanted = (name for name in KEPT_FILES if name != TOKENIZER or not converts)
    return [name for name in wanted if not (folder / name).is_file()]
