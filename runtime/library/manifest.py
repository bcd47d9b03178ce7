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
from moeinf.native import KV_Q8_VALUES, kv_q8_row_bytes
from moeinf.offload.format.drives import bare
from moeinf.offload.format.layout import (
    ITEM_BYTES,
    LAYOUT_VERSIONS,
    ExpertForms,
    ExpertKey,
    ExpertLayout,
    is_tiled,
    largest_slot_bytes,
    plain_form,
)
from moeinf.offload.format.row_table import TABLE_VERSION, RowTable, table_path
from moeinf.offload.format.shards import Bytes, FileRecord, shard_path
from moeinf.offload.store.budget import SlotBudget
from moeinf.runtime.config import Kv
from moeinf.runtime.files.atomic import write_bytes_durably
from moeinf.runtime.files.regular import NotRegular, read_regular
from moeinf.runtime.library.defaults import Defaults
from moeinf.runtime.names import ModelName

FORMAT_VERSION = 1
_MOST_WORDS = 500  # of an error about its values, which may quote any text
MANIFEST = "manifest.json"
DENSE = "dense.safetensors"
MTP = "mtp"  # the folder of the modules of multi-token prediction
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


class _TableVersion(Struct):
    layout: int


class _Versions(Struct):
    """The fields that decide whether this moeinf can read the others."""

    format: int
    dtype: str
    layout: int
    layouts: dict[str, int] = {}
    tables: tuple[_TableVersion, ...] = ()


class MtpPart(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The modules of multi-token prediction, as a model in the folder MTP.

    Each field replaces that of the model's manifest; 0 leaves it.
    """

    layers: _Count
    dtype: str
    layout: int
    dense_bytes: _Count
    kv_bytes_per_token: _Count
    forms: tuple[ExpertForms, ...] = ()
    layouts: dict[str, int] = {}
    kv_q8_bytes_per_token: Bytes = 0
    experts: Bytes = 0
    top_k: Bytes = 0
    intermediate: Bytes = 0


class Manifest(Struct, frozen=True, forbid_unknown_fields=True):
    """The manifest of a pulled model: its shape, its sizes in bytes and its files.

    A model of one format has only `dtype` and `layout`. Else `forms` has the formats of the experts
    of each MoE layer, or of every expert in the order of cells, or one pair for all. `layouts` has
    the layout versions of the formats other than dtype, of experts and dense tensors. `dense_forms`
    has the formats of linears that were chosen one by one, by name.
    """

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
    width: Bytes = 0  # of hidden states, where the experts' `hidden` is another; see hidden_width
    usual_context: _Count | None = None  # the default of --ctx; None: max_context
    forms: tuple[ExpertForms, ...] = ()
    layouts: dict[str, int] = {}
    dense_forms: dict[str, str] = {}
    kv_q8_bytes_per_token: Bytes = 0  # 0: that of kv_q8_bytes
    base: str | None = None  # ORG/NAME@COMMIT of the tokenizer, in place of a GGUF file's own
    mtp: MtpPart | None = None
    tables: tuple[RowTable, ...] = ()
    defaults: Defaults | None = None  # of a name that `moeinf create` made
    format: int = FORMAT_VERSION

    @property
    def hidden_width(self) -> int:
        """The width of the model's hidden states: D, unless its experts work on fewer numbers."""
        return self.width or self.hidden

    @property
    def modules(self) -> Manifest | None:
        """The manifest of the modules of multi-token prediction; None: the model has none.

        Its files are in the folder MTP.
        """
        if self.mtp is None:
            return None
        own, inside = msgspec.structs.asdict(self.mtp), f"{MTP}/"
        for name in ("experts", "top_k", "intermediate"):
            own[name] = own[name] or getattr(self, name)
        files = tuple(
            msgspec.structs.replace(file, path=file.path.removeprefix(inside))
            for file in self.files
            if file.path.startswith(inside)
        )
        unlike = {"dense_forms": {}, "state_bytes": 0, "usual_context": None, "mtp": None}
        unlike |= {"tables": ()}
        return msgspec.structs.replace(self, files=files, **own, **unlike)

    @property
    def model(self) -> ModelName:
        return ModelName(self.name, self.tag)

    @property
    def expert_layouts(self) -> tuple[ExpertLayout, ...]:
        """The layout of every expert, in the order of cells. Equal ones are one object."""
        forms = self.forms or (ExpertForms(self.dtype, self.dtype),)
        made = {
            pair: ExpertLayout(
                self.hidden, self.intermediate, pair.inner, self.activation, self.biased, pair.down
            )
            for pair in set(forms)
        }
        times = self.layers * self.experts // len(forms)
        return tuple(made[pair] for pair in forms for _ in range(times))

    @property
    def expert_bytes(self) -> int:
        """The mean bytes of an expert; layers may differ."""
        return sum(x.data_bytes for x in self.expert_layouts) // (self.layers * self.experts)

    @property
    def read_bytes(self) -> int:
        """The mean bytes of an expert in whole pages: what a read of it moves."""
        return sum(x.slot_bytes for x in self.expert_layouts) // (self.layers * self.experts)

    @property
    def expert_bits(self) -> float:
        """The mean bits per weight of the experts, with scales and biases."""
        layouts = self.expert_layouts
        return 8 * sum(x.data_bytes for x in layouts) / sum(x.weights for x in layouts)

    @property
    def slots(self) -> SlotBudget:
        size = largest_slot_bytes(self.expert_layouts)
        return SlotBudget(size, self.layers * self.experts, self.top_k)

    def kv_token_bytes(self, form: Kv) -> int:
        """Return the bytes of a token in the KV cache (models/layers/kv_cache.py)."""
        if form == "full" or self.encoder_layers:
            return self.kv_bytes_per_token
        items = self.kv_bytes_per_token // ITEM_BYTES[plain_form(self.dtype)]
        return self.kv_q8_bytes_per_token or kv_q8_bytes(items)

    def kv_bytes(self, context: int, form: Kv = "full") -> int:
        """Return the bytes of a request with up to `context` tokens."""
        return self.state_bytes + context * self.kv_token_bytes(form)

    @property
    def size_bytes(self) -> int:
        return sum(file.size_bytes for file in self.files)

    @property
    def digest(self) -> str:
        """The SHA-256, in hex, of the files' names and hashes: equal for equal content.

        It does not cover the model's name or drives, so a copy has the digest of its origin.
        """
        lines = sorted(f"{file.sha256}  {bare(file.path)}\n" for file in self.files)
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
        by_path = {bare(file.path): file for file in self.files}
        wanted = [
            shard_path(ExpertKey(layer, expert))
            for layer in range(self.layers)
            for expert in range(self.experts)
        ]
        missing = [path for path in wanted if path not in by_path]
        if missing:
            raise DamagedModel(f"{self.model}: manifest.json lacks {missing[0]}")
        return [by_path[path] for path in wanted]

    def table_files(self, number: int) -> list[FileRecord]:
        """Return the files of table `number`. Raises DamagedModel if the manifest lacks one."""
        count = len(self.tables[number].rows)
        return [self.file(table_path(number, file)) for file in range(count)]


def kv_q8_bytes(items: int) -> int:
    """Return the bytes in q8 of KV items in rows of whole blocks, as nearly all models have."""
    return items // KV_Q8_VALUES * kv_q8_row_bytes(KV_Q8_VALUES)


def storable(origin: str) -> str:
    """Return a source's name as a manifest stores it: bytes outside UTF-8 are replaced."""
    return origin.encode(errors="surrogateescape").decode(errors="replace")


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write the manifest durably. After this the folder is a complete model."""
    about = msgspec.structs.asdict(manifest)
    for name in (
        "forms",
        "layouts",
        "dense_forms",
        "base",
        "kv_q8_bytes_per_token",
        "mtp",
        "tables",
        "defaults",
    ):  # only where they are set: versions up to 0.1 refuse them
        if not about[name]:
            del about[name]
    text = msgspec.json.format(msgspec.json.encode(about), indent=1)
    private = manifest.defaults is not None  # a Modelfile's SYSTEM and MESSAGE
    write_bytes_durably(folder / MANIFEST, text + b"\n", 0o600 if private else 0o644)


def read_manifest(folder: Path) -> Manifest:
    """Return the manifest of a folder.

    Raises FileNotFoundError, or DamagedModel for an invalid manifest. NewerModel and OlderModel
    are DamagedModel, too.
    """
    path, shown = folder / MANIFEST, f"{folder.parent.name}:{folder.name}"
    try:
        text = read_regular(path, _MAX_BYTES)
        _check_versions(shown, _VERSIONS.decode(text))
        manifest = _MANIFEST.decode(text)
        _check(manifest)
        if (own := manifest.modules) is not None:
            _check_versions(shown, _Versions(own.format, own.dtype, own.layout, own.layouts))
            _check(own)
        return manifest
    except NotRegular as error:
        raise DamagedModel(f"{shown}: {MANIFEST} is damaged ({problem(error)})") from error
    except DamagedModel:
        raise
    except (ValueError, RecursionError) as error:
        raise DamagedModel(
            f"{shown}: {MANIFEST} is damaged ({str(error)[:_MOST_WORDS]})"
        ) from error


def _check_versions(model: str, found: _Versions) -> None:
    for what, version, ours in (
        ("format", found.format, FORMAT_VERSION),
        *(
            (f"{form} layout", version, LAYOUT_VERSIONS.get(form, 0))
            for form, version in {**found.layouts, found.dtype: found.layout}.items()
        ),
        *(("table layout", table.layout, TABLE_VERSION) for table in found.tables),
    ):
        if version > ours > 0:
            raise NewerModel(
                f"{model}: {what} {version} is newer than this moeinf, which reads {ours}"
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
    _check_forms(manifest)
    if manifest.defaults is not None:
        manifest.defaults.check()
    for number, table in enumerate(manifest.tables):
        for place, found in enumerate(manifest.table_files(number)):
            if found.size_bytes != table.file_bytes(place):
                raise ValueError(f"{found.path} is not of the size of its rows")
    for shard, layout in zip(manifest.shards(), manifest.expert_layouts, strict=True):
        if shard.data_bytes != layout.data_bytes:
            raise ValueError("a shard is not of the size of an expert")


def _check_forms(manifest: Manifest) -> None:
    """Raise ValueError unless `forms` suits the layers, and each format has a version."""
    if not manifest.forms:
        return
    if len(manifest.forms) not in (1, manifest.layers, manifest.layers * manifest.experts):
        raise ValueError(f"it has formats of {len(manifest.forms)} layers, not {manifest.layers}")
    used = {form for pair in manifest.forms for form in pair} | {*manifest.dense_forms.values()}
    if unknown := used - {manifest.dtype, *manifest.layouts}:
        raise ValueError(f"it lacks the version of the {min(unknown)} layout")
    if not all(map(is_tiled, (*used, manifest.dtype))):
        raise ValueError("layers of several formats are not all tiled")


# Made here, not at the first use: msgspec builds the tables of a type without a lock.
_VERSIONS = msgspec.json.Decoder(_Versions)
_MANIFEST = msgspec.json.Decoder(Manifest)
