"""The model of a suite in every format that its programs read, at the size that the disk allows.

A real shape routes as a real model did (benchmarks/recorded_routing.py), or is calibrated
(benchmarks/calibrated.py). The quick suite takes a thin shape, which only shows that everything
works; its routing is random.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from benchmarks.calibrated import named
from benchmarks.models import GGUF_BITS, GGUF_OF_TAG, RaceModel
from benchmarks.peers.table import Weights
from benchmarks.recorded_routing import fitted, name_of, routed, text
from benchmarks.shapes import Config, shape
from moeinf.runtime.checkpoints.checkpoint import SINGLE
from moeinf.runtime.library.manifest import Manifest
from moeinf.runtime.system import physical_bytes

_CONTEXT = 8192
THIN: Config = {
    "hidden_size": 256,
    "intermediate_size": 128,
    "vocab_size": 2048,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "num_hidden_layers": 4,
    "max_position_embeddings": _CONTEXT,
}
_BITS_OF_TAG = {"q4": 4.75, "q8": 8.75, "bf16": 16.0}  # per weight, about
_SPARE_BYTES = 4 << 30  # of the disk, never filled
_RAM_SHARE = 0.5  # of the machine's memory that a model in bfloat16 may take


@dataclass(frozen=True)
class SuiteModel:
    """One model in a cache folder; `python` makes the GGUF file (it has gguf and llama_cpp)."""

    race: RaceModel
    tag: str
    python: str
    routing: str

    def text(self, length: int, prompt: int, seed: int) -> list[int]:
        """Return the tokens of a conversation; the first `prompt` are its prompt."""
        return text(self.routing, self.race.config, length, prompt, seed)

    @property
    def name(self) -> str:
        return f"{self.race.name}:{self.tag}"

    def manifest(self) -> Manifest:
        return self.race.ours(self.tag)

    def file(self, weights: Weights) -> Path:
        """Return the file that a peer reads, made if absent. Raises OSError (ENOSPC)."""
        if weights == "gguf":
            return self.race.peer(GGUF_OF_TAG[self.tag], self.python)
        return self.race.huggingface()

    def bits(self, weights: Weights | None) -> float:
        """Return the bits per weight, about; None: ours."""
        if weights is None:
            return _BITS_OF_TAG[self.tag]
        return GGUF_BITS[GGUF_OF_TAG[self.tag]] if weights == "gguf" else 16.0


def make(
    cache: Path,
    name: str,
    layers: int | None,
    tag: str,
    formats: set[Weights],
    python: str,
    routing: str,
) -> SuiteModel:
    """Return the model of shape `name` (or "thin"); layers None: the most layers that fit."""
    if name == "thin":
        config = {**shape("olmoe", layers, experts=16), **THIN}
        return SuiteModel(RaceModel(cache, "thin", config), tag, python, "calibrated")
    layers = layers or layers_that_fit(cache, name, tag, formats, routing)
    race = routed(cache, _named(name, layers), _shape(name, layers), routing)
    return SuiteModel(race, tag, python, routing)


def _shape(name: str, layers: int) -> Config:
    """Return the config with a longer context than OLMoE's 4,096 tokens, which are too few."""
    return shape(name, layers) | {"max_position_embeddings": _CONTEXT}


def _named(name: str, layers: int) -> str:
    return f"{named(name, layers)}-{_CONTEXT // 1024}k"


def layers_that_fit(cache: Path, name: str, tag: str, formats: set[Weights], routing: str) -> int:
    """Return the most layers, halving from the real shape, for which disk and memory suffice.

    Files that are already in the cache need no space. Raises SystemExit when two layers do not fit.
    """
    layers: int = shape(name)["num_hidden_layers"]
    while layers >= 2:
        config = fitted(_shape(name, layers), routing)
        race = RaceModel(cache, name_of(_named(name, layers), routing), config)
        if _missing_bytes(race, tag, formats) < _free(cache) and (
            "checkpoint" not in formats or 2 * race.weights() < _RAM_SHARE * physical_bytes()
        ):
            return layers
        layers //= 2
    raise SystemExit(f"no version of {name} fits on the disk of {cache}; delete it, or --layers 1")


def _missing_bytes(race: RaceModel, tag: str, formats: set[Weights]) -> float:
    weights = race.weights()
    kind = GGUF_OF_TAG[tag]
    there = {
        race.folder(tag) / "manifest.json": _BITS_OF_TAG[tag],
        **({race.gguf(kind): GGUF_BITS[kind]} if "gguf" in formats else {}),
    }
    if "checkpoint" in formats:
        there[race.cache / "checkpoints" / race.name / SINGLE] = 16.0
    return sum(weights * bits / 8 for path, bits in there.items() if not path.exists())


def _free(cache: Path) -> int:
    cache.mkdir(parents=True, exist_ok=True)
    return shutil.disk_usage(cache).free - _SPARE_BYTES
