"""The messages between stages. Nothing in a message is executed, and every number is bounded."""

from __future__ import annotations

from typing import Annotated, Literal

import numpy as np
import torch
from msgspec import Meta, Struct
from torch import Tensor

from moeinf.runtime.config import MOST_PARALLEL, MOST_WINDOW, Kv

_Number = Annotated[int, Meta(ge=0, lt=1 << 48)]
_Words = Annotated[str, Meta(max_length=1000)]


class About(Struct, frozen=True, forbid_unknown_fields=True):
    """The facts of a stage, which the first one compares with its own."""

    version: _Words
    arithmetic: _Words  # see runtime.version
    model: _Words
    digest: _Words
    first: _Number  # of its layers
    stop: _Number
    kv: Kv
    context: _Number  # the most that it has memory for
    parallel: _Number  # the same, of states
    window: Annotated[int, Meta(ge=1, le=MOST_WINDOW)]  # rows of a pass


class Begin(Struct, frozen=True, forbid_unknown_fields=True):
    """The first stage is loaded. context: of each state, the same in all stages."""

    context: Annotated[int, Meta(ge=1, lt=1 << 48)]


class Rows(Struct, frozen=True, forbid_unknown_fields=True):
    """The rows of one state in a pass, which become its tokens from `past` on.

    A stage drops what its own state has beyond `past`: so truncation needs no message.
    """

    state: Annotated[int, Meta(ge=0, lt=MOST_PARALLEL)]
    request: _Number
    past: _Number
    count: Annotated[int, Meta(ge=1, le=MOST_WINDOW)]


class Pass(Struct, frozen=True, forbid_unknown_fields=True):
    """A pass over some rows, whose states follow. pieces: in chunks of PREFILL_CHUNK.

    Without rows it stops the pass that runs, and has no answer.
    """

    number: _Number
    rows: Annotated[tuple[Rows, ...], Meta(max_length=MOST_PARALLEL)]
    pieces: bool


class Reply(Struct, frozen=True, forbid_unknown_fields=True):
    """The answer to a pass. busy: a layer has begun, and more follows. done: states follow."""

    number: _Number
    what: Literal["busy", "done", "failed"]
    words: _Words = ""


def bytes_of(states: Tensor) -> memoryview:
    """Return the bytes of contiguous states [T, D], to be read or written."""
    flat: np.ndarray = states.view(torch.uint8).flatten().numpy()
    return memoryview(flat)  # type: ignore[arg-type]
