"""Test the pipeline of two stages: it computes the bits of one engine."""

from __future__ import annotations

import socket
import threading
from typing import Any

from benchmarks.hops import Line, listener
from benchmarks.pipeline import answer, checksum, make_stage, run_pipeline
from moeinf.runtime.dense.cpu_block import NativeBlocks
from moeinf.runtime.engine.engine import Engine
from tests.conftest import Open

TEXTS = [[1, 5, 9, 2, 7, 3], [4, 4, 8, 1, 6, 2]]


def layers_of(engine: Engine) -> int:
    """Return the number of layers that an engine computes."""
    model: Any = engine.model
    parts = model.body.blocks
    return sum(len(part.blocks) if isinstance(part, NativeBlocks) else 1 for part in parts)


def test_both_halves_have_the_bits_of_the_whole(open_engine: Open) -> None:
    whole = open_engine("demo", memory="100%")
    wanted = []
    for tokens in TEXTS:
        state = whole.new_state()
        whole.begin_request(state)
        wanted.append([checksum(whole.extend(state, [token])) for token in tokens])
    first, second = (open_engine("demo", memory="50%", policy="lru") for _ in range(2))
    size = 2 * whole.info.manifest.hidden_width
    with listener() as door:
        ours = socket.create_connection(door.getsockname())
        theirs = door.accept()[0]
    with ours, theirs:
        make_stage(first, 0, Line(ours, size, 0.0))
        make_stage(second, 1, Line(theirs, size, 0.0))
        thread = threading.Thread(
            target=answer, args=(second, Line(theirs, 4, 0.0), len(TEXTS), len(TEXTS[0]))
        )
        thread.start()
        _, found = run_pipeline(first, Line(ours, 4, 0.0), TEXTS)
        thread.join()
    assert found == wanted
    half = whole.info.manifest.layers // 2
    assert (layers_of(first), layers_of(second)) == (half, half)
