"""Each reader of a text from outside takes linear time, whichever of its marks is repeated.

TARGETS of targets.py is the list of these readers. tools/fuzz.py builds such texts for hours.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest

pytest.importorskip("resource", reason="needs limits of processes, which Windows lacks")

from tests.faults.growing import Grown, check_growth, repeating, seconds
from tests.faults.targets import TARGETS, Target

pytestmark = pytest.mark.filterwarnings("ignore")
BYTES = 64 << 10
FEW, MANY = 6, 100  # texts of each target
MORE = {"answers": 8}  # times as many
# The largest texts that a server reads: a body, a Modelfile, a text of `create`, the headers.
# test_hostile_texts.py sends the largest conversations.
LARGEST = {"json": 8 << 20, "modelfile": 2 << 20, "quoted": 64 << 10, "headers": 64 << 10}
LATER = ("config",)  # its seeds take 10 s, and are built for test_corpus.py already


def reading(
    target: Target, grown: Callable[[int], bytes], folder: Path, size: int
) -> Callable[[], object]:
    data = grown(size)

    def read() -> None:
        with suppress(*target.refuses, AssertionError):  # other tests look at what was read
            target.check(data, folder)

    return read


def check(name: str, texts: int, folder: Path) -> None:
    target, rng = TARGETS[name], random.Random(name)
    seeds = target.seeds()
    for _ in range(texts * MORE.get(name, 1)):
        grown = repeating(rng.choice(seeds), rng)
        try:
            check_growth(partial(reading, target, grown, folder), BYTES)
        except Grown as error:
            raise AssertionError(f"{name}: {error}: {grown(200)!r}") from error


@pytest.mark.parametrize("name", sorted(set(TARGETS) - set(LATER)))
def test_four_times_the_text_takes_four_times_as_long(name: str, tmp_path: Path) -> None:
    check(name, FEW, tmp_path)


@pytest.mark.full
@pytest.mark.parametrize("name", sorted(TARGETS))
def test_more_texts(name: str, tmp_path: Path) -> None:
    check(name, MANY, tmp_path)


@pytest.mark.parametrize("name", LARGEST)
def test_the_largest_text_takes_a_second(name: str, tmp_path: Path) -> None:
    target, rng = TARGETS[name], random.Random(name)
    for grown in [repeating(seed, rng) for seed in target.seeds() for _ in range(3)]:
        work = reading(target, grown, tmp_path, LARGEST[name])
        assert min(seconds(work) for _ in range(2)) <= 1, grown(200)


def test_planted_growth_is_found() -> None:
    def square(size: int) -> Callable[[], object]:
        return lambda: [sum(range(size)) for _ in range(size)]

    with pytest.raises(Grown):
        check_growth(square, 4000)
