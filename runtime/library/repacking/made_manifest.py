"""Make the manifest of a model from the inventory of its checkpoint."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from dataclasses import replace

from moeinf.offload.format.layout import LAYOUT_VERSIONS, ExpertForms
from moeinf.offload.format.shards import FileRecord
from moeinf.runtime.checkpoints.inventory import Inventory
from moeinf.runtime.library.manifest import Manifest, MtpPart, kv_q8_bytes, storable
from moeinf.runtime.library.repacking.mixed_bits import BASE
from moeinf.runtime.library.sources import Source
from moeinf.runtime.names import ModelName, bits_of_tag

FORMS_OF_TAG = {  # of experts; dense tensors follow from the first (Inventory.form_of)
    "q2": ExpertForms("Q2", "Q2"),
    "q3": ExpertForms("Q3", "Q3"),
    "q4": ExpertForms("Q4", "Q4"),
    "q4d8": ExpertForms("Q4", "Q8"),
    "q8": ExpertForms("Q8", "Q8"),
    "mxfp4": ExpertForms("MXFP4", "MXFP4"),
    "nvfp4": ExpertForms("NVFP4", "NVFP4"),
    "q4k": ExpertForms("Q4K", "Q4K"),
    "q5k": ExpertForms("Q5K", "Q5K"),
    "q6k": ExpertForms("Q6K", "Q6K"),
    "bf16": ExpertForms("BF16", "BF16"),
    "f32": ExpertForms("F32", "F32"),
}


def made_manifest(
    source: Source, inventory: Inventory, name: ModelName, files: Sequence[FileRecord]
) -> Manifest:
    """Return the manifest of an inventory in the formats of the tag of `name`."""
    mixed, moe = bits_of_tag(name.tag) is not None, inventory.moe
    dtype = BASE if mixed else FORMS_OF_TAG[name.tag].inner
    return Manifest(
        name=name.name,
        tag=name.tag,
        family=inventory.family.model_type,
        source=storable(source.origin),
        revision=source.revision,
        base=source.settled,
        created_at=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        layers=moe.layers,
        experts=moe.experts,
        top_k=moe.top_k,
        hidden=moe.hidden,
        intermediate=moe.intermediate,
        dtype=dtype,
        dense_bytes=inventory.dense_bytes(dtype),
        kv_bytes_per_token=inventory.kv_bytes_per_token(dtype),
        kv_q8_bytes_per_token=_odd_q8_bytes(inventory),
        max_context=inventory.max_context,
        files=tuple(files),
        layout=LAYOUT_VERSIONS[dtype],
        state_bytes=inventory.state_bytes,
        activation=moe.activation,
        biased=moe.biased,
        encoder_layers=moe.encoder_layers,
        width=moe.width,
        usual_context=inventory.usual_context,
        forms=_forms(inventory, dtype),
        dense_forms=dict(inventory.forms.dense) if mixed else {},
        layouts=_layouts(inventory, dtype),
        mtp=_mtp_part(inventory),
        tables=inventory.row_tables(dtype),
    )


def _forms(inventory: Inventory, dtype: str) -> tuple[ExpertForms, ...]:
    """Return the formats of the experts: one pair for all, or () if dtype alone decides."""
    forms = inventory.forms.experts
    if len(set(forms)) != 1:
        return forms
    return () if set(forms) == {ExpertForms(dtype, dtype)} else forms[:1]


def _layouts(inventory: Inventory, dtype: str) -> dict[str, int]:
    return {form: LAYOUT_VERSIONS[form] for form in sorted(inventory.forms.used - {dtype})}


def _mtp_part(inventory: Inventory) -> MtpPart | None:
    own, dtype = inventory.mtp, inventory.mtp_dtype
    if own is None:
        return None
    shape, models = own.moe, inventory.moe
    same = shape == replace(models, layers=shape.layers)
    return MtpPart(
        layers=own.moe.layers,
        dtype=dtype,
        layout=LAYOUT_VERSIONS[dtype],
        dense_bytes=own.dense_bytes(dtype),
        kv_bytes_per_token=own.kv_bytes_per_token(dtype),
        forms=_forms(own, dtype),
        layouts=_layouts(own, dtype),
        kv_q8_bytes_per_token=_odd_q8_bytes(own),
        experts=0 if same else shape.experts,
        top_k=0 if same else shape.top_k,
        intermediate=0 if same else shape.intermediate,
    )


def _odd_q8_bytes(inventory: Inventory) -> int:
    """Return the manifest's kv_q8_bytes_per_token: 0 where the rule for whole blocks gives it."""
    given = inventory.kv_q8_bytes_per_token
    usual = given == kv_q8_bytes(inventory.kv_items_per_token)
    return 0 if usual or inventory.moe.encoder_layers else given
