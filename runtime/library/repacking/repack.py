"""Make a model from a checkpoint: one shard per routed expert, the rest in one file.

All data streams in blocks: the workers bound the memory, not the size of the checkpoint. The model
is built beside its final folder and renamed once all of it is durable. So it is absent or complete,
even after a kill, and a rerun continues the unfinished work.
"""

from __future__ import annotations

import dataclasses
import errno
import os
import shutil
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moeinf.errors import UnusableInput
from moeinf.models.families import family_of
from moeinf.native import SHARD_DATA_OFFSET
from moeinf.offload.format.drives import drive_number, link_drives, places
from moeinf.offload.format.layout import ExpertForms, is_tiled
from moeinf.offload.format.shards import write_file
from moeinf.runtime.checkpoints.checkpoint import BadCheckpoint, Checkpoint, parse_object
from moeinf.runtime.checkpoints.finite import WeightCheck
from moeinf.runtime.checkpoints.inventory import Forms, Inventory, take_inventory
from moeinf.runtime.checkpoints.quantised.nvfp4 import NVFP4
from moeinf.runtime.gguf.tags import (
    WHOLE_BLOCKS,
    best_tag,
    describe_broken_rows,
    describe_loss,
    kept_forms,
    whole_blocks,
)
from moeinf.runtime.gguf.tokens import ignored_ids
from moeinf.runtime.library.dense_views import check_opens
from moeinf.runtime.library.library import Library
from moeinf.runtime.library.manifest import Manifest, write_manifest
from moeinf.runtime.library.repacking.made_manifest import FORMS_OF_TAG, made_manifest
from moeinf.runtime.library.repacking.mixed_bits import (
    BASE,
    LADDER,
    choose_forms,
    describe,
    keep_choice,
    kept_choice,
)
from moeinf.runtime.library.repacking.shard_writer import Assembler, all_targets
from moeinf.runtime.library.sources import KEPT_FILES, MAX_KEPT_BYTES, Source
from moeinf.runtime.library.staging import StagingFolder, discard, staging_folder, taken_bytes
from moeinf.runtime.machine.memory import keep_heap_small
from moeinf.runtime.names import KEPT_TAGS, TAGS, ModelName, bits_of_tag
from moeinf.runtime.sizes import Progress, format_bytes
from moeinf.runtime.text.tokenizer import TOKENIZER, Tokenizer
from moeinf.runtime.text.tokenizer_trial import check_templates, convert, try_tokenizer

Note = Callable[[str], None]


def repack(
    source: Source,
    library: Library,
    name: ModelName,
    progress: Progress,
    note: Note,
    allow_nan: bool = False,
    use: Sequence[NDArray[np.integer[Any]]] = (),
    mtp: bool = True,
) -> Manifest:
    """Add a checkpoint to the library as the model `name`, replacing an older one.

    Raises ModelDataError or BadCheckpoint before any write if the checkpoint is not a supported
    model. Raises NotFiniteWeights, except with `allow_nan`, which notes the names of such tensors.
    Raises ModelInUse, PullInProgress, MissingDrive, and OSError (disk full).

    use: how often each expert was chosen, [layers, experts] per record. Only a tag of chosen bits
    reads it (mixed_bits.py); records of other shapes are left out.
    mtp: keep the modules of multi-token prediction, if the checkpoint has them.
    """
    keep_heap_small()
    found = take_inventory(family_of(source.checkpoint.config), source.checkpoint, mtp)
    inventory, dtype = in_tag(found, name.tag)
    _check_format(source, inventory, name.tag)
    announce(inventory, name, note)
    if ignored := ignored_ids(source.checkpoint.metadata):
        note(f"ignored, because the file has no such token: {', '.join(ignored)}")
    library.check_unused(name)
    target = library.folder(name)
    making: dict[str, object] = {"source": source.identity(), "tag": name.tag}
    making |= {} if mtp else {"mtp": False}
    homes = library.more_homes
    making |= {"drives": [os.fspath(home) for home in homes]} if homes else {}
    with staging_folder(target, library.locks, making) as work:
        try:
            link_drives(work.folder, homes, f"{name.name}-{name.tag}")
            if len({place.stat().st_dev for place in places(work.folder)}) <= len(homes):
                note("folders of MOEINF_HOME are on one drive, so reads are no faster")
            check_space(work, inventory, dtype, source)
            _keep_small_files(source.small_files(), work)
            check_templates(work.folder)
            if TOKENIZER in work.files:
                try_tokenizer(work.folder / TOKENIZER)
            Tokenizer(work.folder)  # raise now, not at the first run
            check = WeightCheck(allow_nan)
            check.again(work.broken)
            brought = source.bring(work, progress)
            if (bits := bits_of_tag(name.tag)) is not None:
                forms, brought = _chosen(inventory, bits, use, work, brought, note)
                inventory = dataclasses.replace(inventory, forms=forms)
            _assemble(source, inventory, dtype, work, progress, check, brought)
            files = sorted(work.files.values(), key=lambda file: file.path)
            manifest = made_manifest(source, inventory, name, files)
            work.commit()
            check_opens(work.folder, manifest)
            write_manifest(work.folder, manifest)
            library.admit(work.folder, name)
            if work.broken:
                note(
                    f"NaN or infinity in {_first_of(work.broken)}: this model may fail at any token"
                )
            if work.rounded:
                names = _first_of(work.rounded)
                note(f"rounded, because scales or zero points do not fit {name.tag}: {names}")
            remove_strangers(target, (file.path for file in manifest.files))
        except UnusableInput:
            if not source.fetched:  # a rerun would be refused as well
                discard(target)
            raise
    return manifest


@dataclass(frozen=True)
class SourceSizes:
    """The sizes of a pull: what it would fetch and write, in bytes."""

    files: list[tuple[str, int]]  # (name, bytes of its tensors)
    download_bytes: int
    disk_bytes: Mapping[str, int]  # by tag
    extra_bytes: int  # additional disk space during the pull


def measure_source(source: Source, mtp: bool = True) -> SourceSizes:
    """Return the sizes of a pull without any write. Raises ModelDataError, BadCheckpoint."""
    inventory = take_inventory(family_of(source.checkpoint.config), source.checkpoint, mtp)
    sizes: dict[str, int] = {}
    for tensor in source.checkpoint.all_stored():
        sizes[tensor.path.name] = sizes.get(tensor.path.name, 0) + tensor.size_bytes
    fetched = source.download_bytes()
    disk = {}
    for tag in _tags_of(inventory):
        stored, dtype = in_tag(inventory, tag)
        disk[tag] = stored.disk_bytes(dtype)
    return SourceSizes(sorted(sizes.items()), fetched, disk, source.space_bytes())


def _pair_of(tag: str) -> ExpertForms:
    """Return the formats of a tag's experts; of a tag of chosen bits the largest."""
    bits = bits_of_tag(tag)
    if bits is None:
        return FORMS_OF_TAG[tag]
    form = next(form for form in ("Q2", "Q3", "Q4", "Q8") if LADDER[form] >= bits)
    return ExpertForms(form, form)


def in_tag(inventory: Inventory, tag: str) -> tuple[Inventory, str]:
    """Return the inventory with the formats that a tag stores, and the tag's own format.

    The tag that suits a GGUF file best keeps the types of its tensors. A tag with two formats sets
    those of all experts. A tag without tiles drops `forms`: it widens. Rows that are not whole
    blocks of a K type have another format (whole_blocks). The modules of multi-token prediction
    get the same tag, or q8 where they cannot have it.
    """
    if (own := inventory.mtp) is not None:
        mixed = bits_of_tag(tag) is not None
        own, dtype = in_tag(own, tag if mixed or tag in _tags_of(own) else "q8")
        inventory = dataclasses.replace(inventory, mtp=own, mtp_dtype=dtype)
    pair, forms = _pair_of(tag), inventory.forms
    if bits_of_tag(tag) is not None:  # until they are chosen: the largest that experts can get
        return dataclasses.replace(inventory, forms=Forms((pair,))), BASE
    if tag == best_tag(t for _, _, t in inventory.expert_matrices()):
        forms = kept_forms(inventory)
    elif not is_tiled(pair.inner):
        forms = Forms()
    elif pair.inner != pair.down:
        forms = dataclasses.replace(forms, experts=(pair,))
    elif pair.inner in WHOLE_BLOCKS:
        forms = whole_blocks(inventory, pair.inner)
    return dataclasses.replace(inventory, forms=forms), pair.inner


def _tags_of(inventory: Inventory) -> list[str]:
    """Return the tags that this checkpoint can have."""
    best = best_tag(t for _, _, t in inventory.expert_matrices())
    return [
        tag
        for tag in TAGS
        if tag not in KEPT_TAGS or tag == best or (tag == "mxfp4" and inventory.has_mxfp4)
    ]


def _check_format(source: Source, inventory: Inventory, tag: str) -> None:
    if bits_of_tag(tag) is None and tag not in _tags_of(inventory):
        raise BadCheckpoint(
            f"{source.origin} does not store its experts as {FORMS_OF_TAG[tag].inner}: there is "
            "nothing to keep; the tag q4 quantises them"
        )


def announce(inventory: Inventory, name: ModelName, note: Note) -> None:
    """Report that weights will be rounded, and which tensors will be left out."""
    stored, form = in_tag(inventory, name.tag)
    loss = describe_loss(stored, form) if bits_of_tag(name.tag) is None else None
    if loss is not None:
        note(loss)
    elif inventory.downcasts(form):
        note(f"the source has more bits than {name.tag} keeps; the tag f32 would keep all of them")
    if (broken := describe_broken_rows(stored, form)) is not None:
        note(broken)
    if inventory.has_nvfp4 and is_tiled(form) and form != NVFP4:
        note(
            f"the source is NVFP4 (4.5 bits per weight): {name.tag} rounds it once more, by "
            "8 % in q4 and 0.5 % in q8; the tag nvfp4 keeps it"
        )
    if stored.mtp is not None:
        size = format_bytes(stored.mtp.disk_bytes(stored.mtp_dtype))
        note(f"{size} are for multi-token prediction; --no-mtp leaves it out")
    if inventory.unused:
        note(f"not part of the family, left out: {_first_of(inventory.unused)}")


def _first_of(names: Sequence[str]) -> str:
    return names[0] + (f" and {len(names) - 1} more" if len(names) > 1 else "")


def check_space(work: StagingFolder, inventory: Inventory, dtype: str, source: Source) -> None:
    """Raise OSError (ENOSPC) with the bytes needed unless each drive has room for its part."""
    whole = inventory.forms.experts and source.fetched  # formats may be chosen from all files
    held = max(source.space_bytes(), source.download_bytes() if whole else 0)
    folders, needed = places(work.folder), defaultdict[int, int](int)  # by device
    parts = _parts_bytes(inventory, dtype, len(folders))
    for folder, part in zip(folders, parts, strict=True):
        # Less what an earlier attempt has written.
        needed[folder.stat().st_dev] += part - taken_bytes(folder)
    needed[work.folder.stat().st_dev] += held
    for folder in folders:
        wanted, free = needed[folder.stat().st_dev], shutil.disk_usage(folder).free
        if free < wanted:
            text = f"{format_bytes(wanted)} are needed, the disk has {format_bytes(free)} free"
            raise OSError(errno.ENOSPC, text, str(folder))


def _parts_bytes(inventory: Inventory, dtype: str, drives: int) -> list[int]:
    """Return the bytes on each drive of a model that is spread over so many."""
    parts = [0] * drives
    for key, layout in zip(sorted(inventory.experts), inventory.expert_layouts(dtype), strict=True):
        parts[drive_number(key, drives)] += layout.data_bytes + 2 * SHARD_DATA_OFFSET
    parts[0] += inventory.disk_bytes(dtype) - sum(parts)
    return parts


def _assemble(
    source: Source,
    inventory: Inventory,
    dtype: str,
    work: StagingFolder,
    progress: Progress,
    check: WeightCheck,
    brought: Iterable[Path],
) -> None:
    drives = len(places(work.folder))
    assembler = Assembler(all_targets(inventory, dtype, drives), work, check)
    total = inventory.weight_bytes(dtype)
    if inventory.mtp is not None:
        total += inventory.mtp.weight_bytes(inventory.mtp_dtype)

    def tell() -> None:
        progress("repacking", assembler.bytes, total)

    tell()
    held: list[Path] = []  # files in use; some weights wait for scales in another file
    for path in brought:
        assembler.feed(path, source.is_here, tell)
        held.append(path)
        spent = [file for file in held if assembler.spent(file)]
        for file in spent:
            work.add_done(file.name)
        work.commit()  # before the sources are released
        for file in spent:
            held.remove(file)
            source.release(file)
    tell()


def _chosen(
    inventory: Inventory,
    bits: float,
    use: Sequence[NDArray[np.integer[Any]]],
    work: StagingFolder,
    brought: Iterable[Path],
    note: Note,
) -> tuple[Forms, Iterable[Path]]:
    """Return the formats for a mean of `bits`, and the source files, all of which are here then.

    An earlier attempt's choice is kept.
    """
    if (kept := kept_choice(work.folder)) is not None:
        return kept, brought
    here = list(brought)
    shape = (inventory.moe.layers, inventory.moe.experts)
    counts = [counts for counts in use if counts.shape == shape]
    plain = dataclasses.replace(inventory, forms=Forms())
    forms = choose_forms(plain, bits, sum(counts[1:], counts[0]) if counts else None)
    keep_choice(work.folder, forms)
    note(describe(forms))
    return forms, here


def _keep_small_files(checkpoint: Checkpoint, work: StagingFolder) -> None:
    """Write the small files. Those of an earlier attempt that the source lacks now are dropped."""
    for name in KEPT_FILES:
        work.files.pop(name, None)

    def read(name: str) -> bytes | None:
        return checkpoint.small_file(name, MAX_KEPT_BYTES)

    for name in KEPT_FILES:
        data = read(name)
        if data is None:
            continue
        if name.endswith(".json"):
            parse_object(data, checkpoint.folder / name)
        work.add_file(write_file(work.folder, name, b"", [memoryview(data)]))
    if TOKENIZER not in work.files:
        _convert_tokenizer(read, work)


def _convert_tokenizer(read: Callable[[str], bytes | None], work: StagingFolder) -> None:
    data = convert(read)
    if data is not None:
        work.add_file(write_file(work.folder, TOKENIZER, b"", [memoryview(data)]))


def prospects(source: Source, name: ModelName) -> dict[str, Manifest]:
    """Return, by possible tag, the manifests that `repack` would write, without their files.

    K types, q3 and q2 are left out unless `name` or the checkpoint has them. It writes nothing.
    Raises ModelDataError or BadCheckpoint if `name` cannot be made.
    """
    inventory = take_inventory(family_of(source.checkpoint.config), source.checkpoint)
    _check_format(source, inventory, name.tag)
    usual = {name.tag, best_tag(t for _, _, t in inventory.expert_matrices())}
    return {
        tag: made_manifest(source, in_tag(inventory, tag)[0], ModelName(name.name, tag), ())
        for tag in dict.fromkeys((*_tags_of(inventory), name.tag))
        if tag in usual or _pair_of(tag).inner not in (*WHOLE_BLOCKS, "Q3", "Q2")
    }


def remove_strangers(folder: Path, wanted: Iterable[str]) -> None:
    """Remove from a finished folder all files that its manifest does not name."""
    keep = {*wanted, "manifest.json"}
    for path in folder.rglob("*"):
        if path.is_file() and os.fspath(path.relative_to(folder)) not in keep:
            path.unlink()
    folders = (p for p in folder.rglob("*") if p.is_dir() and not p.is_symlink())
    for path in sorted(folders, reverse=True):
        if not any(path.iterdir()):
            path.rmdir()
