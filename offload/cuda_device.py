"""torch's CUDA device as the tier sees it: its stream, its memory, our kernels.

Does not know slots' meaning, nor what is resident. Imported only where torch has CUDA and Triton is
installed (runtime/gpu.py asks first).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moeinf.native import OutOfDeviceMemory
from moeinf.offload.device_ffn import DeviceMath
from moeinf.offload.layout import ExpertLayout
from moeinf.offload.slot_math import ExpertRunner, TorchFfn


class CudaDevice:
    """Device 0, and the stream that is torch's when this is made."""

    def __init__(self) -> None:
        self._device = torch.device("cuda", 0)
        self.stream = int(torch.cuda.current_stream(self._device).cuda_stream)
        self.out_of_memory: tuple[type[Exception], ...] = (
            torch.cuda.OutOfMemoryError, OutOfDeviceMemory,
        )  # fmt: skip

    def math(
        self, layout: ExpertLayout, address: int, shape: tuple[int, int], reference: TorchFfn
    ) -> ExpertRunner:
        arena = torch.as_tensor(_Memory(address, shape), device=self._device)
        return DeviceMath(layout, arena, reference)

    def upload(self, x: Tensor) -> Tensor:
        return x.to(self._device)  # from pageable memory: read by the time it returns

    def empty_rows(self, x: Tensor, count: int) -> Tensor:
        return x.new_empty(count, x.shape[1])

    def download(self, rows: Tensor) -> Tensor:
        return rows.cpu()

    def release(self) -> None:
        torch.cuda.empty_cache()


class _Memory:
    """Device memory that is not torch's, as arrays are told of one another."""

    def __init__(self, address: int, shape: tuple[int, int]) -> None:
        self.__cuda_array_interface__: dict[str, Any] = {
            "shape": shape, "typestr": "|u1", "data": (address, False), "version": 3,
        }  # fmt: skip
