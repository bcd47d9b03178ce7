"""Test the benchmark of a pipeline: its delay, and that it compares the bits of one engine."""

from __future__ import annotations

import socket
import threading
import time
from pathlib import Path

from benchmarks.hops import listener
from benchmarks.pipeline import checksum, delayed, run_pipeline
from moeinf.runtime.config import Settings
from moeinf.runtime.engine.engine import Engine
from moeinf.runtime.library.library import Library
from tests.conftest import Open
from tests.runtime.engine.pipeline.stages import config, stages

TEXTS = [[1, 5, 9, 2, 7, 3], [4, 4, 8, 1, 6, 2]]
DELAY_S = 0.05


def test_both_halves_have_the_bits_of_the_whole(open_engine: Open, demo_home: Path) -> None:
    whole = open_engine("demo", memory="100%")
    wanted = []
    for tokens in TEXTS:
        state = whole.new_state()
        whole.begin_request(state)
        wanted.append([checksum(whole.extend(state, [token])) for token in tokens])
    settings = Settings(demo_home)
    given = (*Library(settings).read("demo"),)
    with (
        stages(*given, settings, [3], 6, parallel=2) as (stage,),
        Engine.open(*given, config(stages=(stage.address,), parallel=2), settings) as engine,
    ):
        assert run_pipeline(engine, TEXTS)[1] == wanted


def test_every_byte_is_late() -> None:
    with listener() as far, listener() as near:
        thread = threading.Thread(target=delayed, args=(far, near.getsockname()[1], DELAY_S))
        thread.start()
        with socket.create_connection(far.getsockname()) as ours, near.accept()[0] as theirs:
            for source, target in ((ours, theirs), (theirs, ours)):
                begin = time.monotonic()
                source.sendall(b"one")
                assert target.recv(3) == b"one"
                assert DELAY_S <= time.monotonic() - begin < DELAY_S + 5
            ours.shutdown(socket.SHUT_WR)
            assert theirs.recv(1) == b""
            theirs.shutdown(socket.SHUT_WR)
            thread.join()
