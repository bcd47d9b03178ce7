"""Test that chosen bits lose less than a uniform format of as many bytes, and survive a kill."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from moeinf.runtime.config import EngineConfig, Settings
from moeinf.runtime.eamc.collection_file import recorded_use
from moeinf.runtime.engine.engine import Engine
from moeinf.runtime.jobs.evaluate import evaluate
from moeinf.runtime.library.library import DEMO_CHECKPOINT, Library
from moeinf.runtime.library.staging import partial_folder
from moeinf.runtime.names import parse_name
from moeinf.runtime.sizes import parse_memory
from tests.cli.conftest import command_in
from tests.runtime.library.repacking.test_bit_choice import made

TURN = "<|begin|><|user|>{prompt}<|assistant|>{answer}<|end|>"
KILLED = """
import os, sys
from pathlib import Path
import numpy as np
from moeinf.runtime.config import Settings
from tests.runtime.library.repacking import test_bit_choice

def progress(*told):
    if any(Path(sys.argv[1]).rglob("E020.safetensors")):
        os.kill(os.getpid(), 9)

test_bit_choice.ignore = progress
test_bit_choice.made(Settings(Path(sys.argv[1])), "b3.5", np.load(sys.argv[2]))
"""


def text(every: int) -> str:
    """Return one of `every` held-out exercises of each kind."""
    lines = (DEMO_CHECKPOINT / "heldout.jsonl").read_text().splitlines()
    return "".join(TURN.format(**json.loads(line)) for line in lines[::every])


def divergence(settings: Settings, tag: str, words: str) -> float:
    """Return the KL divergence from bf16 on a text, in nats per token."""
    library, config = Library(settings), EngineConfig(memory=parse_memory("100%"), threads=1)

    def engine(tag: str) -> Engine:
        manifest, folder = library.read(f"demo:{tag}")
        return Engine.open(manifest, folder, config, settings)

    with engine(tag) as one, engine("bf16") as reference:
        found = evaluate(one, reference, words).kl_divergence
    assert found is not None
    return found


@pytest.mark.full
def test_less_is_lost_than_by_one_format_of_as_many_bytes(tmp_path: Path) -> None:
    """4.5 bits without records against q4; then 3.5 bits, which is below q3, with records."""
    settings, moeinf = Settings(tmp_path), command_in(tmp_path)
    for tag in ("bf16", "q4", "q3", "b4.5"):
        made(settings, tag)
    assert moeinf("trace", "demo:bf16", "--dataset", "demo", "--limit", "28").code == 0
    (use,) = recorded_use(settings, "demo")
    assert use.shape == (6, 32)
    assert moeinf("pull", "demo", "--bits", "3.5").code == 0
    sizes = {
        tag: Library(settings).read(f"demo:{tag}")[0].size_bytes
        for tag in ("q4", "q3", "b4.5", "b3.5")
    }
    assert sizes["b4.5"] <= sizes["q4"]
    assert sizes["b3.5"] <= sizes["q3"]
    words = text(every=32)
    loss = {tag: divergence(settings, tag, words) for tag in sizes}
    assert loss["b4.5"] < loss["q4"]
    assert loss["b3.5"] < loss["q3"]


def test_a_killed_pull_goes_on_with_its_choice(tmp_path: Path) -> None:
    """Use that was recorded after the kill does not change the formats."""
    use = np.ones((6, 32), np.int64)
    use[:, 5] = 1000
    np.save(tmp_path / "use.npy", use)
    arguments = [str(tmp_path / "killed"), str(tmp_path / "use.npy")]
    child = subprocess.run([sys.executable, "-c", KILLED, *arguments], check=False)
    assert child.returncode == -signal.SIGKILL
    settings = Settings(tmp_path / "killed")
    partial = partial_folder(Library(settings).folder(parse_name("demo:b3.5")))
    assert (partial / "bits.json").exists()
    resumed = made(settings, "b3.5", np.flip(use, 1))
    whole = made(Settings(tmp_path / "whole"), "b3.5", use)
    assert [(f.path, f.sha256) for f in resumed.files] == [(f.path, f.sha256) for f in whole.files]
    assert (resumed.forms, resumed.dense_forms) == (whole.forms, whole.dense_forms)
    assert resumed.forms[5] != resumed.forms[26]  # where the other use has its maximum
    assert not partial.exists()
    assert not list(partial.parent.rglob("bits.json"))
