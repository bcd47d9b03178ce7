"""Join the tensors of each quantised matrix into one, by the config's method.

fp8.py, fused_experts.py (MXFP4), packed_integers.py and nvfp4.py read the results. Here are the
checks of names, dtypes and shapes for compressed-tensors and ModelOpt, whose checkpoints may mix
formats: every matrix has the format that its own tensors show. Matrices of neither are plain.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from moeinf.models.quantisation import (
    MOE_KEY,
    MOE_NVFP4,
    IntegerScheme,
    integer_schemes,
    quantised_section,
)
from moeinf.runtime.checkpoints.checkpoint import (
    TORCH_DTYPE,
    BadCheckpoint,
    Checkpoint,
    SourceTensor,
)
from moeinf.runtime.checkpoints.quantised import nvfp4
from moeinf.runtime.checkpoints.quantised.fp8 import join_scales
from moeinf.runtime.checkpoints.quantised.fused_experts import join_blocks
from moeinf.runtime.checkpoints.quantised.packed_integers import BITS, INT4, INT8

_WEIGHT, _PACKED = ".weight", ".weight_packed"
_WORD_BITS = 32
# Factors of activations and of the KV cache, which stay in higher precision here.
_UNUSED = (
    ".input_scale",
    ".input_global_scale",
    ".input_zero_point",
    ".k_scale",
    ".output_scale",
    ".q_scale",
    ".v_scale",
)


def joined(
    checkpoint: Checkpoint, ignores: Callable[[str], bool] = lambda _: False
) -> Mapping[str, SourceTensor]:
    """Return the tensors of a checkpoint, one per matrix, by the name X.weight.

    Parts of a matrix may be in different files. ignores: names that are left as they are, because
    the family does not load them. Raises BadCheckpoint for parts that are missing, misshapen or of
    another dtype.
    """
    section = quantised_section(checkpoint.config)
    if section.get("quant_method") not in ("compressed-tensors", "modelopt"):
        if section.get(MOE_KEY) == MOE_NVFP4:
            checkpoint = _with_nvfp4(checkpoint)
        return join_blocks(checkpoint, join_scales(checkpoint))
    found = {n: t for n, t in checkpoint.tensors.items() if not n.endswith(_UNUSED)}
    schemes = integer_schemes(section)
    for name, tensor in checkpoint.tensors.items():
        if ignores(name):
            continue
        if name.endswith(_PACKED):
            _join_packed(found, name.removesuffix(_PACKED), tensor, schemes)
        elif name.endswith(_WEIGHT) and tensor.dtype == "U8":
            _join_nvfp4(found, name.removesuffix(_WEIGHT), tensor, nvfp4.FACTOR)
        elif name.endswith(_WEIGHT) and tensor.dtype == "F8_E4M3":
            _join_fp8(found, name.removesuffix(_WEIGHT), tensor)
    return found


def _with_nvfp4(checkpoint: Checkpoint) -> Checkpoint:
    """Join the NVFP4 matrices of a checkpoint whose other matrices are blocks of 8 bits."""
    found = {n: t for n, t in checkpoint.tensors.items() if not n.endswith(_UNUSED)}
    for name, tensor in checkpoint.tensors.items():
        if tensor.dtype == "U8" and name.endswith(_WEIGHT):
            _join_nvfp4(found, name.removesuffix(_WEIGHT), tensor, nvfp4.FACTOR)
    return replace(checkpoint, tensors=found)


class _Parts:
    """The tensors X.* that belong to one matrix. Those taken leave `found`."""

    def __init__(self, found: dict[str, SourceTensor], prefix: str, weight: SourceTensor) -> None:
        self._found, self._prefix, self.weight = found, prefix, weight
        for end, why in (("_g_idx", "reordered groups"), (".pre_quant_scale", "scaled inputs")):
            other = f"{prefix}{_WEIGHT}{end}" if end[0] == "_" else prefix + end
            if other in found:
                raise BadCheckpoint(f"{weight.path}: {other!r}: {why} are not supported")
        if len(weight.shape) != 2 or 0 in weight.shape:
            raise self.misfit(weight, "a matrix")
        found.pop(weight.name, None)

    def take(self, end: str) -> SourceTensor | None:
        return self._found.pop(f"{self._prefix}{_WEIGHT}{end}", None)

    def need(self, end: str) -> SourceTensor:
        """Return X.weight`end`. Raises BadCheckpoint if it is missing."""
        part = self.take(end)
        if part is None:
            raise BadCheckpoint(f"{self.weight.path}: {self.weight.name!r} has no weight{end}")
        return part

    def put(self, tensor: SourceTensor) -> None:
        """Add the joined matrix. Raises BadCheckpoint if the file has a plain one, too."""
        name = self._prefix + _WEIGHT
        if name in self._found:
            raise BadCheckpoint(f"{self.weight.path}: {self.weight.name!r} stands beside {name!r}")
        self._found[name] = replace(tensor, name=name)

    @staticmethod
    def misfit(part: SourceTensor, wanted: str) -> BadCheckpoint:
        return BadCheckpoint(
            f"{part.path}: {part.name!r} is {list(part.shape)} {part.dtype}, not {wanted}"
        )


def _join_packed(
    found: dict[str, SourceTensor],
    prefix: str,
    packed: SourceTensor,
    schemes: frozenset[IntegerScheme],
) -> None:
    if packed.dtype == "U8":
        _join_nvfp4(found, prefix, packed, nvfp4.DIVISOR)
        return
    parts = _Parts(found, prefix, packed)
    if packed.dtype != "I32":
        raise parts.misfit(packed, "packed codes, I32 or U8")
    scales, zeros, stated = parts.need("_scale"), parts.take("_zero_point"), parts.take("_shape")
    rows, words = packed.shape
    if len(scales.shape) != 2 or scales.shape[0] != rows or scales.dtype not in TORCH_DTYPE:
        raise parts.misfit(scales, f"a float per group of the {rows} rows")
    fitting = {s for s in schemes if s.groups(words * _WORD_BITS // s.bits) == scales.shape[1]}
    if len(fitting) != 1:
        problem = "fits no group" if not fitting else "fits several groups"
        raise BadCheckpoint(
            f"{scales.path}: {scales.name!r} is {list(scales.shape)}, which {problem} of "
            f"quantization_config for {words} words of codes per row"
        )
    scheme = fitting.pop()
    columns = words * _WORD_BITS // scheme.bits
    packed_rows = -(-rows * scheme.bits // _WORD_BITS)
    if zeros is not None and (zeros.dtype, zeros.shape) != ("I32", (packed_rows, scales.shape[1])):
        raise parts.misfit(zeros, f"{[packed_rows, scales.shape[1]]} I32")
    if zeros is None and not scheme.symmetric:
        raise BadCheckpoint(f"{packed.path}: {packed.name!r} has no weight_zero_point")
    if stated is not None and (stated.dtype not in ("I64", "I32") or stated.shape != (2,)):
        raise parts.misfit(stated, "two whole numbers")
    parts.put(
        replace(
            packed,
            dtype={BITS[INT4]: INT4, BITS[INT8]: INT8}[scheme.bits],
            shape=(rows, columns),
            scales=scales,
            block=(1, columns // scales.shape[1]),
            zeros=zeros,
            stated=stated,
        )
    )


def _join_nvfp4(found: dict[str, SourceTensor], prefix: str, codes: SourceTensor, end: str) -> None:
    parts = _Parts(found, prefix, codes)
    rows, columns = codes.shape[0], codes.shape[1] * 2
    scales, factor = parts.need("_scale"), parts.need(end)
    if (scales.dtype, scales.shape) != ("F8_E4M3", (rows, columns // nvfp4.GROUP)) or (
        columns % nvfp4.GROUP
    ):
        raise parts.misfit(scales, f"F8_E4M3, one per {nvfp4.GROUP} of [{rows}, {columns}] weights")
    if factor.dtype != "F32" or factor.shape not in ((), (1,)):
        raise parts.misfit(factor, "one F32")
    parts.put(
        replace(
            codes,
            dtype=nvfp4.NVFP4,
            shape=(rows, columns),
            scales=scales,
            block=(1, nvfp4.GROUP),
            factor=factor,
        )
    )


def _join_fp8(found: dict[str, SourceTensor], prefix: str, weight: SourceTensor) -> None:
    """Join 8-bit floats with one scale for all, one per row, or one per block of weights."""
    parts = _Parts(found, prefix, weight)
    rows, columns = weight.shape
    scales = parts.take("_scale_inv") or parts.need("_scale")
    shape = {(): (1, 1), (1,): (1, 1), (rows,): (rows, 1)}.get(scales.shape, scales.shape)
    if scales.dtype not in TORCH_DTYPE or len(shape) != 2 or 0 in shape:
        raise parts.misfit(scales, "a float for all weights, per row or per block")
    block = (_side(rows, shape[0]), _side(columns, shape[1]))
    if tuple(-(-side // step) for side, step in zip(weight.shape, block, strict=True)) != shape:
        raise parts.misfit(scales, f"one per block of [{rows}, {columns}] weights")
    parts.put(replace(weight, scales=replace(scales, shape=shape), block=block))


def _side(weights: int, scales: int) -> int:
    """Return the side of a block: a power of 2, unless one scale is for one or for all."""
    if scales in (1, weights):
        return weights // scales
    return 1 << max(0, -(-weights // scales) - 1).bit_length()
