"""Memory limits of a process, measured by the kernel, in separate processes.

Peak RSS ≤ budget + dense weights + KV cache + 64 MiB + the process after its imports.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from gguf import GGMLQuantizationType as Kind

from scripts.make_checkpoint import config, make_checkpoint
from tests.gguf_files import matrices, write_gguf

MIB = 1 << 20
PULL = """
import sys
from pathlib import Path
import moeinf.runtime.library.repacking.repack
from moeinf.runtime.gguf.checkpoint import open_local
from moeinf.runtime.config import Settings
from moeinf.runtime.library.library import Library
from moeinf.runtime.machine.memory import peak_rss_bytes, rss_bytes
from moeinf.runtime.names import parse_name
from moeinf.runtime.library.repacking.repack import repack
from moeinf.runtime.library.sources import LocalSource
imported = rss_bytes()
source = LocalSource(open_local(Path(sys.argv[1])), "x")
library = Library(Settings(Path(sys.argv[2])))
nothing = lambda *_: None
repack(source, library, parse_name(sys.argv[3]), nothing, nothing)
print(peak_rss_bytes() - imported)
"""
RUN = """
import sys
from pathlib import Path
from moeinf.runtime.generation.chat import Conversation
from moeinf.runtime.config import EngineConfig, Settings
from moeinf.runtime.engine.engine import Engine
from moeinf.runtime.requests import Limits
from moeinf.runtime.library.library import Library
from moeinf.runtime.machine.memory import peak_rss_bytes, rss_bytes
from moeinf.runtime.sampling.sampler import SamplingOptions
from moeinf.runtime.sizes import parse_memory
settings = Settings(Path(sys.argv[1]))
manifest, folder = Library(settings).read(sys.argv[2])
imported = rss_bytes()
config = EngineConfig(memory=parse_memory(sys.argv[3]), context=512)
with Engine.open(manifest, folder, config, settings) as engine:
    place = engine.info.placement
    text = "".join(chr(32 + 7 * i % 90) for i in range(450))
    list(Conversation(engine).complete(text, SamplingOptions(temperature=0), Limits(24)))
    allowed = place.memory_bytes + place.dense_bytes + place.kv_bytes
    print(peak_rss_bytes() - imported, allowed, engine.store.stats.bytes_read)
"""


def figures(script: str, *arguments: str) -> list[int]:
    run = subprocess.run(
        [sys.executable, "-c", script, *arguments], capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    return [int(word) for word in run.stdout.split()]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pull two models of 300 and 470 MB in processes whose memory is measured."""
    checkpoint, home = tmp_path_factory.mktemp("checkpoint"), tmp_path_factory.mktemp("home")
    size = make_checkpoint(checkpoint, config(6, 32, 512, 512, 4), file_bytes=80 * MIB)
    assert size > 300 * MIB
    for name in ("many", "many:f32"):
        (grown,) = figures(PULL, str(checkpoint), str(home), name)
        # blocks of two workers, read and converted, but not the checkpoint
        assert grown < 128 * MIB
    make_checkpoint(checkpoint / "wide", config(2, 64, 2048, 256, 8))
    (grown,) = figures(PULL, str(checkpoint / "wide"), str(home), "wide")
    assert grown < 128 * MIB  # blocks of two workers, read and converted, but not the checkpoint
    return home


@pytest.mark.full
@pytest.mark.parametrize(
    ("model", "memory"),
    [("many", "30%"), ("many", "100%"), ("many", "12MiB"), ("many:f32", "30%"), ("wide", "30%")],
)
def test_a_run_stays_within_its_budget(model: str, memory: str, home: Path) -> None:
    grown, allowed, loaded = figures(RUN, str(home), model, memory)
    assert grown <= allowed + 64 * MIB
    if memory != "100%":
        assert loaded > allowed  # more was loaded than fits


@pytest.mark.full
def test_a_pull_of_a_gguf_file_does_not_grow_with_it(tmp_path: Path) -> None:
    """The larger file has four times the experts, in two parts; both pulls need the same."""
    grown = []
    for experts in (8, 32):
        folder = tmp_path / str(experts)
        make_checkpoint(folder, config(4, experts, 512, 512, 4))
        path = write_gguf(folder, folder / "x-BF16.gguf", matrices(Kind.BF16), split=30)
        size = sum(part.stat().st_size for part in folder.glob("*.gguf"))
        grown += figures(PULL, str(path), str(tmp_path / "home"), f"x{experts}:q8")
        assert (size > 180 * MIB) is (experts == 32)
    assert max(grown) < 128 * MIB
    assert grown[1] < grown[0] + 16 * MIB
