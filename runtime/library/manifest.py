"""The manifest: what a pulled model consists of. Written last, so its presence means complete.

Does not know how files come to be, nor what is done with them.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from moeinf.errors import Failure
from moeinf.native import PAGE_BYTES
from moeinf.offload.format.layout import LAYOUT_VERSIONS, ExpertKey, ExpertLayout
from moeinf.offload.format.shards import FileRecord, shard_path
from moeinf.offload.store.budget import SlotBudget
from moeinf.runtime.atomic_files import write_text_durably
from moeinf.runtime.names import ModelName
from moeinf.runtime.regular_files import NotRegular, read_regular

FORMAT_VERSION = 1
MANIFEST = "manifest.json"
DENSE = "dense.safetensors"
_MAX_BYTES = 256 << 20
_COUNTS = (
    "layers", "experts", "top_k", "hidden", "intermediate", "max_context", "dense_bytes",
    "kv_bytes_per_token",
)  # fmt: skip


class DamagedModel(Failure, ValueError):
    """A file of a pulled model is not what the manifest says it is."""

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


@dataclass(frozen=True)
class Manifest:
    """A pulled model: its shape, its sizes in bytes and its files."""

    name: str
    tag: str
    family: str
    source: str
    revision: str | None
    created_at: str
    layers: int  # MoE layers
    experts: int  # routed experts per MoE layer
    top_k: int
    hidden: int
    intermediate: int
    dtype: str
    dense_bytes: int
    kv_bytes_per_token: int
    max_context: int
    files: tuple[FileRecord, ...]
    layout: int  # the version of its format's layout
    state_bytes: int = 0  # what a request takes beside its kv_bytes_per_token
    activation: str = "swiglu"  # of the experts; see models/layers/ffn.py
    biased: bool = False  # their matrices have biases
    encoder_layers: int = 0  # of the layers, the first: they run once per request
    usual_context: int | None = None  # where --ctx does not say; None: max_context
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
        """What a request of up to `context` tokens takes: see models/layers/kv_cache.py."""
        return self.state_bytes + context * self.kv_bytes_per_token

    @property
    def size_bytes(self) -> int:
        return sum(file.size_bytes for file in self.files)

    @property
    def digest(self) -> str:
        """SHA-256 in hex of the files' names and hashes: models that hold the same have the same.

        Not of the model's own name, so that a copy has its origin's.
        """
        lines = sorted(f"{file.sha256}  {file.path}\n" for file in self.files)
        return hashlib.sha256("".join(lines).encode()).hexdigest()

    def file(self, path: str) -> FileRecord:
        """The record of one file. Raises DamagedModel when the manifest lacks it."""
        for file in self.files:
            if file.path == path:
                return file
        raise DamagedModel(f"{self.model}: the manifest names no {path}")

    def shards(self) -> list[FileRecord]:
        """The shard of every expert, in the order of cells (layer · E + expert)."""
        by_path = {file.path: file for file in self.files}
        wanted = [
            shard_path(ExpertKey(layer, expert))
            for layer in range(self.layers)
            for expert in range(self.experts)
        ]
        missing = [path for path in wanted if path not in by_path]
        if missing:
            raise DamagedModel(f"{self.model}: the manifest names no {missing[0]}")
        return [by_path[path] for path in wanted]


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Makes the manifest durable: from here on the model exists."""
    write_text_durably(folder / MANIFEST, json.dumps(asdict(manifest), indent=1) + "\n")


def read_manifest(folder: Path) -> Manifest:
    """Raises FileNotFoundError, or DamagedModel for anything that is not a whole manifest."""
    path = folder / MANIFEST
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise DamagedModel(f"{path} is too large to be a manifest")
        raw = json.loads(read_regular(path, _MAX_BYTES))
        if not isinstance(raw, dict):
            raise DamagedModel(f"{path} is no manifest")
        _check_version(path, "format", raw.get("format"), FORMAT_VERSION)
        form = str(raw.get("dtype"))
        _check_version(path, f"{form} layout", raw.get("layout"), LAYOUT_VERSIONS.get(form, 0))
        raw["files"] = tuple(_record(file) for file in raw["files"])
        manifest = Manifest(**raw)
        for field in _COUNTS:
            if type(raw[field]) is not int or not 1 <= raw[field] < 1 << 48:
                raise DamagedModel(f"{path}: {field} is {raw[field]!r}")
        if type(manifest.state_bytes) is not int or not 0 <= manifest.state_bytes < 1 << 48:
            raise DamagedModel(f"{path}: state_bytes is {manifest.state_bytes!r}")
        for field in ("name", "tag", "family", "source", "created_at"):
            if not isinstance(raw[field], str):
                raise DamagedModel(f"{path}: {field} is {raw[field]!r}")
        if type(manifest.encoder_layers) is not int or not (
            0 <= manifest.encoder_layers < manifest.layers
        ):
            raise DamagedModel(f"{path}: encoder_layers is {manifest.encoder_layers!r}")
        usual = manifest.usual_context
        if usual is not None and (type(usual) is not int or not 1 <= usual <= manifest.max_context):
            raise DamagedModel(f"{path}: usual_context is {usual!r}")
        if type(manifest.biased) is not bool or not isinstance(manifest.activation, str):
            raise DamagedModel(f"{path}: the experts' activation or biases are not described")
        if manifest.layers * manifest.experts > len(manifest.files):
            raise DamagedModel(f"{path}: it names fewer files than there are experts")
        data_bytes = manifest.expert_layout.data_bytes
        shards = manifest.shards()
        if any(shard.data_bytes != data_bytes for shard in shards):
            raise DamagedModel(f"{path}: a shard is not of the size of an expert")
        return manifest
    except DamagedModel:
        raise
    except FileNotFoundError:
        raise
    except NotRegular as error:
        raise DamagedModel(f"{path} is {error.strerror}") from error
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise DamagedModel(f"{path} is damaged: {error}") from error


def _check_version(path: Path, what: str, version: Any, ours: int) -> None:
    if type(version) is int and version > ours > 0:
        raise NewerModel(f"{path}: {what} {version} is newer than this moeinf, which knows {ours}")
    if type(version) is int and 0 < version < ours:
        raise OlderModel(f"{path}: {what} {version} is older than this moeinf, which reads {ours}")
    if version != ours:
        raise DamagedModel(f"{path}: {what} {version}, not {ours}")


def _record(raw: dict[str, Any]) -> FileRecord:
    record = FileRecord(**raw)
    parts = PurePosixPath(record.path).parts
    if not parts or ".." in parts or record.path.startswith("/") or "\0" in record.path:
        raise ValueError(f"a file name leaves the model's folder: {record.path!r}")
    numbers = (record.size_bytes, record.data_offset, record.crc32c)
    if any(type(n) is not int or not 0 <= n < 1 << 48 for n in numbers):
        raise ValueError(f"{record.path!r} has no possible size or checksum")
    if record.data_offset % PAGE_BYTES or record.data_offset > record.size_bytes:
        raise ValueError(f"{record.path!r} has no possible data_offset")
    return record
