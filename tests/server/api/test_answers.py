"""Test the HTTP status of each error, and which errors are called bugs."""

from __future__ import annotations

import pytest

from moeinf.errors import DeviceError, OutOfDeviceMemory, as_moeinf
from moeinf.offload.store.budget import DoesNotFit
from moeinf.offload.store.transfer import ExpertReadError
from moeinf.runtime.invalid import InvalidValue
from moeinf.runtime.library.manifest import DamagedModel, NewerModel
from moeinf.runtime.machine.device_choice import DeviceUnavailable
from moeinf.server.api.answers import words_of

_FAILED = "if this persists, restart `moeinf serve`: a process cannot use a GPU after a fault"


@pytest.mark.parametrize(
    ("error", "status", "words"),
    [
        (InvalidValue("temperature must be at least 0"), 400, "temperature must be at least 0"),
        (ValueError("oh"), 500, "this is a bug in moeinf: ValueError: oh"),
        (DamagedModel("m: a shard is short"), 500, "m: a shard is short"),
        (
            ExpertReadError("experts/L000/E001.safetensors", "CRC-32C differs"),
            500,
            "the expert shard experts/L000/E001.safetensors cannot be read: CRC-32C differs",
        ),
        (NewerModel("m: layout 9"), 500, "m: layout 9"),
        (DeviceError("the device is gone"), 503, f"the device is gone: {_FAILED}"),
        (DeviceUnavailable("no GPU"), 503, f"no GPU: {_FAILED}"),
        (
            OutOfDeviceMemory("none is left"),
            503,
            "none is left: give `moeinf serve` less --device-memory, or free device memory",
        ),
        (MemoryError(), 503, "not enough memory"),
        (OSError(28, "No space left on device", "/f"), 500, "/f: the disk is full"),
        (RuntimeError("oh"), 500, "this is a bug in moeinf: RuntimeError: oh"),
        (KeyError("oh"), 500, "this is a bug in moeinf: KeyError: 'oh'"),
    ],
)
def test_errors_in_words(error: Exception, status: int, words: str) -> None:
    """A damaged model is neither a bad request nor a bug."""
    told = as_moeinf(error)
    assert told.http_status == status
    assert words_of(told) == words


def test_too_little_memory_is_no_bug() -> None:
    error = DoesNotFit(1, 2)
    assert error.http_status == 503
    assert words_of(error) == str(error)
