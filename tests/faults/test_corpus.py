"""Run the fuzzer's saved corpus and a few thousand new inputs.

tools/fuzz.py runs for hours.
"""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("resource", reason="needs limits of processes, which Windows lacks")

from tests.faults.conftest import Tally
from tests.faults.targets import TARGETS
from tools.fuzz import CORPUS, mutate, run_one

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize("name", sorted(TARGETS))
def test_every_input_is_read_or_refused(name: str, tmp_path: Path, tally: Tally) -> None:
    target, rng = TARGETS[name], random.Random(0)
    seeds = target.seeds()
    kept = [path.read_bytes() for path in sorted((CORPUS / name).glob("*"))]
    for data in seeds:
        came = run_one(target, data, tmp_path, seconds=0)
        assert came in ("read", "refused"), came
    more = [] if name == "parquet" else [mutate(rng.choice(seeds), seeds, rng) for _ in range(40)]
    for data in (*kept, *more):
        came = run_one(target, data, tmp_path)
        tally(came)
        assert came in ("read", "refused"), (came, data[:300])


@pytest.mark.full
def test_the_fuzzer_finds_what_is_planted(tmp_path: Path) -> None:
    """The fuzzer runs on a reader with a planted fault and must report it."""
    planted = """
import sys
from tools import fuzz
from tests.faults.targets import TARGETS, Target
def check(data, folder):
    if data.count(b"a") > 2 and len(data) > 40: raise KeyError("planted")
fuzz.CORPUS = fuzz.Path(sys.argv[1]) / "corpus"
TARGETS.clear()
TARGETS["x"] = Target(check, (ValueError,), lambda: [b"abc"])
sys.argv = ["fuzz", "--minutes", "0.05", "--findings", sys.argv[1] + "/findings"]
sys.exit(fuzz.main())
"""
    run = subprocess.run(
        [sys.executable, "-c", planted, str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert run.returncode == 1, run.stderr
    assert "x: KeyError" in run.stdout
    assert list((tmp_path / "findings" / "x").iterdir())
