"""Find the copies of a model's experts in fewer bits: those of its tag q2.

Pulling, listing, checking and removing that model is that of any other.
"""

from __future__ import annotations

from pathlib import Path

from moeinf.errors import UnusableInput
from moeinf.offload.format.layout import ExpertLayout
from moeinf.runtime.library.library import Library
from moeinf.runtime.library.manifest import Manifest, read_manifest
from moeinf.runtime.names import ModelName

_TAG, _FORM = "q2", "Q2"
_WITHOUT = "the same command without --experts"


class NoLowCopy(UnusableInput, ValueError):
    """A model has no usable copy of its experts in q2. hint: how to make one, if it is possible."""

    code = "no_low_copy"

    def __init__(self, words: str, hint: str = _WITHOUT) -> None:
        super().__init__(words)
        self.hint = hint


def low_layout(manifest: Manifest) -> ExpertLayout:
    """Return the layout of a copy of this model's experts. Raises NoLowCopy if it saves little."""
    layout = ExpertLayout(
        manifest.hidden, manifest.intermediate, _FORM, manifest.activation, manifest.biased
    )
    if layout.data_bytes * 3 > manifest.expert_bytes * 2:
        raise NoLowCopy(
            f"--experts q2-on-miss: the experts of {manifest.model} have {manifest.expert_bits:.1f}"
            " bits per weight: a copy in q2 is not smaller by a third"
        )
    return layout


def find_low_copy(manifest: Manifest, library: Library) -> tuple[Path, Manifest]:
    """Return folder and manifest of the model's tag q2.

    Raises NoLowCopy unless it is installed and made of the same checkpoint, and DamagedModel.
    """
    layout, name = low_layout(manifest), ModelName(manifest.name, _TAG)
    if not library.has(name):
        raise NoLowCopy(
            f"--experts q2-on-miss: {name} is not on this machine", f"`moeinf pull {name}`"
        )
    folder = library.folder(name)
    low = read_manifest(folder)
    same = (low.source, low.revision) == (manifest.source, manifest.revision)
    shape = (low.layers, low.experts, {*low.expert_layouts})
    if not same or shape != (manifest.layers, manifest.experts, {layout}):
        raise NoLowCopy(
            f"--experts q2-on-miss: {name} is not of the same checkpoint as {manifest.model}",
            f"`moeinf pull` for both tags, or {_WITHOUT}",
        )
    return folder, low
