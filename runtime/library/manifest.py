"""Read and write the manifest of a pulled model.

It is written last, so a folder with a manifest is a complete model.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from moeinf.errors import Failure, problem
from moeinf.offload.format.layout import LAYOUT_VERSIONS, ExpertKey, ExpertLayout
from moeinf.offload.format.shards import Bytes, FileRecord, shard_path
from moeinf.offload.store.budget import SlotBudget
from moeinf.runtime.atomic_files import write_bytes_durably
from moeinf.runtime.names import ModelName
from moeinf.runtime.regular_files import NotRegular, read_regular

FORMAT_VERSION = 1
MANIFEST = "manifest.json"
DENSE = "dense.safetensors"
_MAX_BYTES = 256 << 20
_Count = Annotated[int, Meta(ge=1, lt=1 << 48)]


class DamagedModel(Failure, ValueError):
    """A file of a pulled model differs from the manifest, or the manifest is damaged."""

    code = "damaged_model"
    hint = "`moeinf verify MODEL --repair`"


class NewerModel(DamagedModel):
    """The model is in a format or layout of a newer moeinf."""

    code = "newer_model"
    hint = "a newer moeinf, or `moeinf rm MODEL` and `moeinf pull MODEL`"


class OlderModel(DamagedModel):
    """The model is in a format or layout that this moeinf no longer reads."""

    code = "older_model"
    hint = "`moeinf pull MODEL` to replace it, or `moeinf rm MODEL`"


class _Versions(Struct):
    """The fields that decide whether this moeinf can read the others."""

    format: int
    dtype: str
    layout: int


class Manifest(Struct, frozen=True, forbid_unknown_fields=True):
    """The manifest of a pulled model: its shape, its sizes in bytes and its files."""

    name: str
    tag: str
    family: str
    source: str
    revision: str | None  # the hub's commit, or a hash over the files of a folder
    created_at: str
    layers: _Count  # MoE layers
    experts: _Count  # routed experts per MoE layer
    top_k: _Count
    hidden: _Count
    intermediate: _Count
    dtype: str
    dense_bytes: _Count
    kv_bytes_per_token: _Count
    max_context: _Count
    files: tuple[FileRecord, ...]
    layout: int  # the version of its format's layout
    state_bytes: Bytes = 0  # per request, in addition to kv_bytes_per_token
    activation: str = "swiglu"  # of the experts; see models/layers/ffn.py
    biased: bool = False  # the experts' matrices have biases
    encoder_layers: Bytes = 0  # the first of the MoE layers, which run once per request
    usual_context: _Count | None = None  # the default of --ctx; None: max_context
    format: int = FORMAT_VERSION

    @property
    def model(self) -> ModelName:
        return ModelName(self.name, self.tag)

    @property
    def expert_layout(self) -> ExpertLayout:
        return ExpertLayout(
            self.hidden, self.intermediate, self.dtype, self.activation, self.biased
        )

    @property
    def slots(self) -> SlotBudget:
        layout = self.expert_layout
        return SlotBudget(layout.slot_bytes, self.layers * self.experts, self.top_k)

    def kv_bytes(self, context: int) -> int:
        """Return the bytes of a request with up to `context` tokens (models/layers/kv_cache.py)."""
        return self.state_bytes + context * self.kv_bytes_per_token

    @property
    def size_bytes(self) -> int:
        return sum(file.size_bytes for file in self.files)

    @property
    def digest(self) -> str:
        """The SHA-256, in hex, of the files' names and hashes: equal for equal content.

        It does not cover the model's name, so a copy has the digest of its origin.
        """
        lines = sorted(f"{file.sha256}  {file.path}\n" for file in self.files)
        return hashlib.sha256("".join(lines).encode()).hexdigest()

    def file(self, path: str) -> FileRecord:
        """Return the record of one file. Raises DamagedModel if the manifest lacks it."""
        for file in self.files:
            if file.path == path:
                return file
        raise DamagedModel(f"{self.model}: manifest.json lacks {path}")

    def shards(self) -> list[FileRecord]:
        """Return the shard of every expert, in the order of cells (layer · E + expert).

        Raises DamagedModel if the manifest lacks one.
        """
        by_path = {file.path: file for file in self.files}
        wanted = [
            shard_path(ExpertKey(layer, expert))
            for layer in range(self.layers)
            for expert in range(self.experts)
        ]
        missing = [path for path in wanted if path not in by_path]
        if missing:
            raise DamagedModel(f"{self.model}: manifest.json lacks {missing[0]}")
        return [by_path[path] for path in wanted]


def storable(origin: str) -> str:
    """Return a source's name as a manifest stores it: bytes outside UTF-8 are replaced."""
    return origin.encode(errors="surrogateescape").decode(errors="replace")


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write the manifest durably. After this the folder is a complete model."""
    text = msgspec.json.format(msgspec.json.encode(manifest), indent=1)
    write_bytes_durably(folder / MANIFEST, text + b"\n")


def read_manifest(folder: Path) -> Manifest:
    """Return the manifest of a folder.

    Raises FileNotFoundError, or DamagedModel for an invalid manifest. NewerModel and OlderModel
    are DamagedModel, too.
    """
    path, shown = folder / MANIFEST, f"{folder.parent.name}:{folder.name}"
    try:
        text = read_regular(path, _MAX_BYTES)
        _check_versions(shown, msgspec.json.decode(text, type=_Versions))
        manifest = msgspec.json.decode(text, type=Manifest)
        _check(manifest)
        return manifest
    except NotRegular as error:
        raise DamagedModel(f"{shown}: {MANIFEST} is damaged ({problem(error)})") from error
    except DamagedModel:
        raise
    except (ValueError, RecursionError) as error:
        raise DamagedModel(f"{shown}: {MANIFEST} is damaged ({error})") from error


def _check_versions(model: str, found: _Versions) -> None:
    layout = LAYOUT_VERSIONS.get(found.dtype, 0)
    for what, version, ours in (
        ("format", found.format, FORMAT_VERSION),
        (f"{found.dtype} layout", found.layout, layout),
    ):
        if version > ours > 0:
            raise NewerModel(
                f"{model}: {what} {version} is newer than this moeinf, which knows {ours}"
            )
        if 0 < version < ours:
            raise OlderModel(
                f"{model}: {what} {version} is older than this moeinf, which reads {ours}"
            )
        if version != ours:
            raise DamagedModel(f"{model}: {what} {version}, not {ours}")


def _check(manifest: Manifest) -> None:
    """Raise ValueError if fields contradict each other."""
    if manifest.encoder_layers >= manifest.layers:
        raise ValueError(f"encoder_layers is {manifest.encoder_layers}")
    if manifest.usual_context is not None and manifest.usual_context > manifest.max_context:
        raise ValueError(f"usual_context is {manifest.usual_context}")
    if manifest.layers * manifest.experts > len(manifest.files):
        raise ValueError("it names fewer files than there are experts")
    for file in manifest.files:
        if file.crc32c is None:
            raise ValueError(f"{file.path!r} has no checksum")
    data_bytes = manifest.expert_layout.data_bytes
    if any(shard.data_bytes != data_bytes for shard in manifest.shards()):
        raise ValueError("a shard is not of the size of an expert")
