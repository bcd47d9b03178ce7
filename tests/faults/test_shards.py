"""Flipped, truncated and swapped shards, before and during loading: never a wrong token."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from moeinf.offload.store.transfer import ExpertReadError
from moeinf.runtime.config import EngineConfig, Settings
from moeinf.runtime.engine.engine import Engine
from moeinf.runtime.generation.chat import Conversation
from moeinf.runtime.library.library import Library
from moeinf.runtime.library.manifest import DamagedModel
from moeinf.runtime.library.verify import verify
from moeinf.runtime.requests import Limits
from moeinf.runtime.sampling.sampler import SamplingOptions
from moeinf.runtime.sizes import parse_memory
from tests.faults.conftest import EVERY, Tally

PROMPT = "sort owl, fig, zebra, ant"


@pytest.fixture
def home(tmp_path: Path, demo_home: Path) -> Path:
    shutil.copytree(demo_home / "models" / "demo" / "bf16", tmp_path / "models/demo/bf16")
    return tmp_path


def flip(path: Path, rng: random.Random) -> None:
    raw = bytearray(path.read_bytes())
    at = rng.randrange(4096, len(raw))
    raw[at] ^= 1 << rng.randrange(8)
    path.write_bytes(raw)


def cut(path: Path, rng: random.Random) -> None:
    with path.open("r+b") as file:
        file.truncate(rng.randrange(path.stat().st_size))


def swap(path: Path, rng: random.Random) -> None:
    """Write another expert's bytes, with the same length and their own valid checksum."""
    others = [p for p in path.parent.iterdir() if p != path]
    path.write_bytes(rng.choice(others).read_bytes())


def replace(path: Path, rng: random.Random) -> None:
    """Replace the file by a new one of the same name, like an editor."""
    new = path.with_suffix(".new")
    new.write_bytes(path.read_bytes()[:-1] + b"\xff")
    new.replace(path)


def remove(path: Path, _rng: random.Random) -> None:
    path.unlink()


@pytest.mark.matrix
@pytest.mark.parametrize("loaded", [False, True])
@pytest.mark.parametrize("damage", [flip, cut, swap, replace, remove])
def test_a_damaged_shard(
    damage: Callable[[Path, random.Random], None], loaded: bool, every_point: bool, home: Path,
    tally: Tally,
) -> None:  # fmt: skip
    settings, rng = Settings(home), random.Random(0)
    manifest, folder = Library(settings).read("demo:bf16")
    config = EngineConfig(memory=parse_memory("5%"), trace=False)
    whole = {path: path.read_bytes() for path in sorted(folder.glob("experts/*/*"))}

    def ask(engine: Engine) -> str:
        talk = Conversation(engine)
        return "".join(talk.ask(PROMPT, SamplingOptions(temperature=0), Limits()))

    with Engine.open(manifest, folder, config, settings) as engine:
        right = ask(engine)
        count = len(whole) if EVERY and every_point else 12
        for path in rng.sample(sorted(whole), count):
            damage(path, rng)
            name = str(path.relative_to(folder))
            try:
                if loaded:
                    said = ask(engine)
                else:
                    with Engine.open(manifest, folder, config, settings) as other:
                        said = ask(other)
            except ExpertReadError as error:
                named = [error.shard]
                tally("an error that names the shard")
            except DamagedModel as error:
                named = [name] if name in str(error) else []
                tally("refused when loading, by name")
            else:
                assert said == right
                named = [name]
                tally("right: it was not needed, or resident")
            assert named == [name]
            broken = [found.path for found in verify(folder, manifest, lambda *_: None)]
            assert broken == ([name] if path.exists() or damage is remove else [])
            path.write_bytes(whole[path])
            assert ask(engine) == right
            assert engine.store.idle
