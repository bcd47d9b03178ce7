"""Find repositories in the Hugging Face cache, so that their weights need no download.

Other programs cache only the files that they needed, often the weights alone. A file that is absent
here may exist in the repository.
"""

from __future__ import annotations

from pathlib import Path

from huggingface_hub import try_to_load_from_cache

from moeinf.runtime.checkpoints.checkpoint import CONFIG, BadCheckpoint, Checkpoint
from moeinf.runtime.checkpoints.torch_bin import open_folder
from moeinf.runtime.library.sources import CONVERTED_FILES, KEPT_FILES
from moeinf.runtime.text.tokenizer import TOKENIZER


def cached_snapshot(name: str, revision: str | None) -> Path | None:
    """Return the cache folder of a repository at one revision, or None."""
    found = try_to_load_from_cache(name, CONFIG, revision=revision)
    return Path(found).parent if isinstance(found, str) else None


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
