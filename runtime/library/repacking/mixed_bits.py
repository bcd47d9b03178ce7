"""Choose the formats of a model of a given mean of bits per weight, such as the tag b3.5.

The error of a format on a matrix is measured on some of its rows: the squared error relative to the
squared weights, to the power of 1.5, because the divergence grows faster than the squared error.
The importance of a matrix is the share of its layer's work that it does:

    a linear             3: every token uses it, and attention needs more bits than experts
    an expert's matrix   the expert's share of its layer's recorded uses; 1 / E without records,
                         which is also a tenth of the share with records: other texts may come

So a linear counts like the experts of three layers. The first and the last layer, `down_proj` and
shared experts have no factor: docs/decisions/0082 says why. The mean covers linears and experts,
not the embedding and the head, which have 8 bits as under the tag q4.

All slots of a cache are as large as the largest expert. So no expert's matrix gets a larger format
than the smallest one of at least the mean.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moeinf.native import tile_columns
from moeinf.offload.format.layout import ExpertForms, stored_bytes
from moeinf.offload.format.quantise import dequantise, quantise
from moeinf.runtime.checkpoints.checkpoint import TORCH_DTYPE, SourceTensor
from moeinf.runtime.checkpoints.encode import encoded
from moeinf.runtime.checkpoints.inventory import Forms, Inventory
from moeinf.runtime.checkpoints.matrix_rows import read_rows
from moeinf.runtime.checkpoints.quantised.ggml import is_ggml
from moeinf.runtime.files.atomic import write_bytes_durably
from moeinf.runtime.library.repacking.bit_choice import Option, choose

# Bits per weight of the formats to choose from. Those with blocks of 256 suit some rows only.
LADDER = {"Q2": 2.5, "Q3": 3.5, "Q4": 4.5, "Q4K": 4.5, "Q5K": 5.5, "Q6K": 6.5625, "Q8": 8.5}
BASE = "Q4"  # the format of matrices that are not chosen, as under the tag q4
_WORKERS = 4
_SPANS, _ROWS = 4, 8  # rows that are measured: 4 times 8 in a row
_LINEAR = 3.0  # importance of a linear; that of a layer's experts together is 1
_POWER = 1.5  # of the squared error
_EVEN = 0.1  # part of an expert's share that records do not change
_FILE = "bits.json"  # in the staging folder: a rerun must not choose again

Errors = dict[str, float]  # by format: (squared error / squared weights) ** _POWER


class _Choice(msgspec.Struct):
    """The content of _FILE."""

    experts: list[ExpertForms]
    dense: dict[str, str]


def choose_forms(inventory: Inventory, bits: float, use: NDArray[np.integer[Any]] | None) -> Forms:
    """Return formats of linears and experts with a mean of at most `bits` per weight.

    use [layers, experts]: how often each expert was chosen; None: equally often. All files of the
    checkpoint must be here. Raises BadCheckpoint, OSError.
    """
    moe = inventory.moe
    names = [n for n in sorted(inventory.tileable) if inventory.form_of(n, BASE) == BASE]
    groups: list[list[SourceTensor]] = [[inventory.dense[name]] for name in names]
    for _, parts in sorted(inventory.experts.items()):
        inner = [parts[role] for role in ("gate", "up") if role in parts]
        groups += [inner, [parts["down"]]]
    with ThreadPoolExecutor(_WORKERS) as pool:
        errors = list(pool.map(_errors_of, groups))
    shares = _shares(use, moe.layers, moe.experts).flatten().tolist()
    weights = [_LINEAR] * len(names) + [share for share in shares for _ in range(2)]
    most = [math.inf] * len(names) + [_largest(group, bits) for group in groups[len(names) :]]
    matrices = [
        [
            Option(form, sum(stored_bytes(form, t.shape) for t in group), weight * error)
            for form, error in found.items()
            if LADDER[form] <= limit
        ]
        for group, found, weight, limit in zip(groups, errors, weights, most, strict=True)
    ]
    budget = bits / 8 * sum(math.prod(t.shape) for group in groups for t in group)
    chosen = [option.form for option in choose(matrices, budget)]
    pairs = zip(chosen[len(names) :: 2], chosen[len(names) + 1 :: 2], strict=True)
    dense = dict(zip(names, chosen, strict=False))
    return Forms(tuple(ExpertForms(*pair) for pair in pairs), dense)


def kept_choice(folder: Path) -> Forms | None:
    """Return the formats that an earlier attempt chose in this staging folder. Raises OSError."""
    path = folder / _FILE
    if not path.exists():
        return None
    found = _CHOICE.decode(path.read_bytes())
    return Forms(tuple(found.experts), found.dense)


def keep_choice(folder: Path, forms: Forms) -> None:
    """Write the formats into the staging folder durably."""
    choice = _Choice(list(forms.experts), dict(forms.dense))
    write_bytes_durably(folder / _FILE, msgspec.json.encode(choice))


def describe(forms: Forms) -> str:
    """Return a sentence with the number of matrices in each format."""
    experts = Counter(form for pair in forms.experts for form in pair)
    return (
        f"formats: linears {_counts(forms.dense.values())}; experts {_counts(experts.elements())}"
    )


def _counts(forms: Iterable[str]) -> str:
    found = Counter(forms)
    return ", ".join(f"{found[f]} in {f.lower()}" for f in LADDER if found[f])


def _shares(use: NDArray[np.integer[Any]] | None, layers: int, experts: int) -> NDArray[np.float64]:
    """Return the importance of each expert, [layers, experts]; a layer's sum is 1."""
    shares = np.full((layers, experts), 1.0 / experts)
    if use is not None:
        uses = use.sum(1, keepdims=True)
        known = np.divide(use, uses, where=uses > 0, out=shares.copy())
        shares = _EVEN * shares + (1.0 - _EVEN) * known
    return shares


def _suits(form: str, columns: int) -> bool:
    return columns % tile_columns(form.lower()) == 0 or not form.endswith("K")


def _largest(group: Sequence[SourceTensor], bits: float) -> float:
    """Return the bits of the smallest format of at least `bits`, for the rows of the group."""
    columns = group[0].shape[-1]
    return min(b for form, b in LADDER.items() if b >= bits and _suits(form, columns))


def _errors_of(group: Sequence[SourceTensor]) -> Errors:
    """Return the sum over the group's matrices, for every format that suits the rows."""
    found: Errors = {}
    for tensor in group:
        rows = _sample(tensor)
        size = float(rows.double().square().sum())
        for form in LADDER:
            if _suits(form, rows.shape[1]):
                wrong = dequantise(quantise(rows, form), form, *rows.shape).sub_(rows)
                error = float(wrong.double().square().sum()) / size if size > 0 else 0.0
                error = error if math.isfinite(error) else 0.0  # the pull itself refuses them
                found[form] = found.get(form, 0.0) + error**_POWER
    return found


def _sample(tensor: SourceTensor) -> Tensor:
    """Return some rows of a matrix in float32, evenly spaced. Raises BadCheckpoint."""
    count = tensor.shape[0]
    spans = [(n * count // _SPANS, _ROWS) for n in range(_SPANS)]
    if count <= _SPANS * _ROWS:
        spans = [(0, count)]
    plain = tensor.recipe is None and tensor.pick is None and tensor.scales is None
    if plain and not is_ggml(tensor.dtype):
        dtype = TORCH_DTYPE[tensor.dtype]
        return torch.cat([read_rows(tensor, first, n, dtype).float() for first, n in spans])
    blocks = [torch.frombuffer(bytearray(b), dtype=torch.float32) for b in encoded(tensor, "F32")]
    whole = torch.cat(blocks).view(count, -1)
    return torch.cat([whole[first : first + n] for first, n in spans]).contiguous()


# Made here, not at the first use: msgspec builds the tables of a type without a lock.
_CHOICE = msgspec.json.Decoder(_Choice)
