"""Test the pipeline of two stages: it computes the bits of one engine."""

from __future__ import annotations

import socket
import threading

import numpy as np

from benchmarks.hops import Line, listener
from benchmarks.pipeline import answer, checksum, make_stage, run_pipeline
from moeinf.runtime.engine.engine import Engine
from tests.conftest import Open

TEXTS = [[1, 5, 9, 2, 7, 3], [4, 4, 8, 1, 6, 2]]


def layers_in_memory(engine: Engine) -> list[int]:
    table, layers = engine.store.host.table, engine.info.manifest.layers
    return [
        int(n)
        for n in np.flatnonzero(table.resident(np.arange(table.cells).reshape(layers, -1)).any(1))
    ]


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
    halves = [layers_in_memory(first), layers_in_memory(second)]
    assert halves[0] + halves[1] == list(range(whole.info.manifest.layers))
    assert len(halves[0]) == len(halves[1])
