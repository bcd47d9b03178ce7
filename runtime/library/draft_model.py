"""Find the model that drafts for another one: `--draft`."""

from __future__ import annotations

from pathlib import Path

from moeinf.errors import UnusableInput
from moeinf.runtime.library.library import Library
from moeinf.runtime.library.manifest import DamagedModel, Manifest
from moeinf.runtime.text.vocabularies import TOKENIZER, difference

_WITHOUT = "the same command without --draft"
_MOST_NAMED = 3


class UnusableDraft(UnusableInput, ValueError):
    """A model cannot be the draft model of another one. hint: models that can, if any."""

    code = "unusable_draft"

    def __init__(self, words: str, hint: str = _WITHOUT) -> None:
        super().__init__(f"--draft: {words}")
        self.hint = hint


def find_draft(
    text: str, manifest: Manifest, source: Path | None, library: Library
) -> tuple[Manifest, Path]:
    """Return manifest and folder of the model that `text` names, to draft for `manifest`'s.

    source: the folder of `manifest`; None: it is not on this machine, and vocabularies are not
    compared. Raises UnusableDraft, and what Library.read raises.
    """
    found, folder = library.read(text)
    if found.model == manifest.model:
        raise UnusableDraft(f"{text} is the model itself", _suitable(manifest, library))
    for one in (manifest, found):
        if one.encoder_layers:
            raise UnusableDraft(f"{one.model} is an encoder-decoder")
    if manifest.dtype == "F32":
        raise UnusableDraft(f"{manifest.model} decodes one token per pass", "another tag")
    why = None
    if source is not None and not same_tokenizer(found, manifest):
        why = difference(folder / TOKENIZER, source / TOKENIZER)
    if why is not None:
        words = f"{found.model} has another vocabulary than {manifest.model} ({why})"
        raise UnusableDraft(words, _suitable(manifest, library))
    if token_bytes(found) >= token_bytes(manifest):
        words = f"{found.model} reads more for a token than {manifest.model}"
        raise UnusableDraft(words, _suitable(manifest, library))
    return found, folder


def same_tokenizer(one: Manifest, other: Manifest) -> bool:
    """Return True if both have the same file of their tokenizer."""
    try:
        return one.file(TOKENIZER).sha256 == other.file(TOKENIZER).sha256
    except DamagedModel:
        return False


def token_bytes(manifest: Manifest) -> int:
    """Return about the bytes that a decoded token reads."""
    return manifest.dense_bytes + manifest.layers * manifest.top_k * manifest.read_bytes


def _suitable(manifest: Manifest, library: Library) -> str:
    """Name the smaller models on this machine that have the tokenizer of `manifest`."""
    found = [
        entry.manifest
        for entry in library.installed()
        if entry.manifest is not None
        and same_tokenizer(entry.manifest, manifest)
        and token_bytes(entry.manifest) < token_bytes(manifest)
        and not entry.manifest.encoder_layers
    ]
    found.sort(key=token_bytes)
    named = [f"--draft {one.model}" for one in found[:_MOST_NAMED]]
    smaller = [] if named else ["a smaller model of the same family"]
    return ", ".join([*named, *smaller]) + f", or {_WITHOUT}"
