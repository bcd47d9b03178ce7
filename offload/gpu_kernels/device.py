"""Give the GPU tier torch's CUDA device: its stream, its memory, our kernels.

Imported only where torch has CUDA and Triton is installed (runtime/machine/gpu.py checks first).
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from moeinf.native import OutOfDeviceMemory
from moeinf.offload.format.layout import ExpertLayout
from moeinf.offload.gpu_kernels import (
    decode_attention,
    elementwise,
    linear,
    prefill_attention,
    router,
)
from moeinf.offload.gpu_kernels.cuda_graphs import CudaGraphs
from moeinf.offload.gpu_kernels.expert_ffn import DeviceMath
from moeinf.offload.gpu_kernels.staging import Staging
from moeinf.offload.store.compute import TorchFfn


class CudaDevice:
    """Device 0, with torch's current stream at construction.

    It has the methods of device_tier.Device, and the functions that compute dense layers.
    """

    place = torch.device("cuda", 0)
    tiled_linear = staticmethod(linear.tiled_linear)
    plain_linear = staticmethod(linear.plain_linear)
    tiled_embedding = staticmethod(linear.tiled_embedding)
    attend_newest = staticmethod(decode_attention.attend_newest)
    attend_rows = staticmethod(prefill_attention.attend_rows)
    rms_norm = staticmethod(elementwise.rms_norm)
    gqa_heads = staticmethod(elementwise.gqa_heads)
    mla_heads = staticmethod(elementwise.mla_heads)
    gated = staticmethod(elementwise.gated)
    route = staticmethod(router.route)

    _limits: ClassVar[dict[int, int]] = {}  # bytes per engine; torch has one limit per process

    def __init__(self, any_torch: bool = False) -> None:
        """Use torch's current stream. any_torch: see CudaGraphs."""
        _compute_as_told()
        self._any_torch = any_torch
        self._staging = Staging(self.place, _pinned, torch.cuda.Event)
        self.stream = int(torch.cuda.current_stream(self.place).cuda_stream)
        self.out_of_memory: tuple[type[Exception], ...] = (
            torch.cuda.OutOfMemoryError, OutOfDeviceMemory,
        )  # fmt: skip

    def math(
        self, layout: ExpertLayout, address: int, shape: tuple[int, int], reference: TorchFfn
    ) -> DeviceMath:
        arena = torch.as_tensor(_Memory(address, shape), device=self.place)
        return DeviceMath(layout, arena, reference, lambda x: self.upload(x)[0])

    def limit(self, size_bytes: int) -> None:
        with CudaGraphs.one_at_a_time:  # no other engine may start during a capture
            self._limits[id(self)] = size_bytes
            if size_bytes <= 0:
                del self._limits[id(self)]
        total = torch.cuda.get_device_properties(self.place).total_memory
        share = min(1.0, sum(self._limits.values()) / total) if self._limits else 1.0
        torch.cuda.set_per_process_memory_fraction(share, self.place)

    def reserved_bytes(self) -> int:
        """Return the bytes that torch has reserved on the device for the process, used or not."""
        return torch.cuda.memory_reserved(self.place)

    def upload(self, *xs: Tensor) -> tuple[Tensor, ...]:
        there = self._staging.up(*xs)
        # For pageable memory the call returns after the driver has read or staged it.
        return there or tuple(x.to(self.place, non_blocking=True) for x in xs)

    def empty_rows(self, x: Tensor, count: int) -> Tensor:
        return x.new_empty(count, x.shape[1])

    def download(self, *xs: Tensor) -> tuple[Tensor, ...]:
        def wait() -> None:
            torch.cuda.current_stream(self.place).synchronize()

        return self._staging.down(wait, *xs) or tuple(x.cpu() for x in xs)

    def release(self) -> None:
        with CudaGraphs.one_at_a_time:  # during a capture torch returns no memory
            torch.cuda.empty_cache()

    def graphs(self) -> CudaGraphs:
        """Return the graphs of this device, for capture and replay."""
        return CudaGraphs(self.place, lambda: len(self._limits) <= 1, self._any_torch)


def _pinned(size_bytes: int) -> Tensor:
    return torch.empty(size_bytes, dtype=torch.uint8, pin_memory=True)


def _compute_as_told() -> None:
    """Set torch's options for this process: no reduced precision, no cuDNN for attention.

    Container images may enable TF32. cuDNN makes a new plan for every length of a text.
    """
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.backends.cuda.enable_cudnn_sdp(False)


class _Memory:
    """Device memory that torch does not own, described by __cuda_array_interface__."""

    def __init__(self, address: int, shape: tuple[int, int]) -> None:
        self.__cuda_array_interface__: dict[str, Any] = {
            "shape": shape, "typestr": "|u1", "data": (address, False), "version": 3,
        }  # fmt: skip
