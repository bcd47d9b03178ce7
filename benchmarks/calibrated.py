"""A real shape whose routing is as local as that of real models: its embeddings have topics.

Weights are the noise of noise.py, except for the token embedding, which is drawn here. Tokens are
forced on every engine, so that all engines route the same.

Why it works: a router sees the normed residual stream, which is the token's embedding plus the
layers' outputs so far. Tokens of one topic have correlated embeddings. So each layer's random
router chooses similar experts for them, and a text that stays in a topic reuses its experts.
`scale` sets how much the layers turn the stream, and so how well a router predicts the next one.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks.models import RaceModel, check_space
from benchmarks.shapes import Config

EMBEDDING = "model.embed_tokens.weight"
_ROWS = 4096  # embedded at a time


@dataclass(frozen=True)
class Calibration:
    """The parameters that were fitted to the real traces; see docs/performance/memory.md.

    scale     root mean square of an embedding; a layer's attention adds some 0.1 to 0.9
    shared    the share of an embedding's variance that comes from its topic: the correlation of
              two tokens of a topic
    topics    token i belongs to topic i mod topics
    stay      probability that the next token has the same topic
    recent    probability that the next token repeats one of the last `memory` tokens of its topic
    """

    scale: float = 2.0
    shared: float = 0.65
    topics: int = 64
    stay: float = 0.965
    recent: float = 0.45
    memory: int = 8
    seed: int = 0

    @property
    def name(self) -> str:
        """The hash of the fields that change weights; stay, recent and memory only change texts."""
        weights = (self.scale, self.shared, self.topics, self.seed)
        return hashlib.sha256(repr(weights).encode()).hexdigest()[:8]


def embeddings(
    calibration: Calibration, first: int, count: int, hidden: int
) -> NDArray[np.float32]:
    """Return [count, hidden] of the tokens from `first` on; a row depends on its token only."""
    c = calibration
    topics = np.random.default_rng((c.seed, 2)).standard_normal((c.topics, hidden), np.float32)
    rows = np.empty((count, hidden), np.float32)
    for place, token in enumerate(range(first, first + count)):
        own = np.random.default_rng((c.seed, 3, token)).standard_normal(hidden, np.float32)
        rows[place] = c.shared**0.5 * topics[token % c.topics] + (1 - c.shared) ** 0.5 * own
    return rows * np.float32(c.scale)


def tokens(calibration: Calibration, vocab: int, count: int, seed: int = 0) -> list[int]:
    """Return `count` token ids below `vocab`: a Markov chain of topics, with recurring words."""
    c = calibration
    random = np.random.default_rng((c.seed, 1, seed))
    topic, said = int(random.integers(c.topics)), dict[int, list[int]]()
    text = []
    for _ in range(count):
        if random.random() >= c.stay:
            topic = int(random.integers(c.topics))
        recent = said.setdefault(topic, [])
        if recent and random.random() < c.recent:
            token = recent[int(random.integers(len(recent)))]
        else:
            token = topic + c.topics * int(random.integers(vocab // c.topics))
        recent.append(token)
        del recent[: -c.memory]
        text.append(token)
    return text


def named(shape: str, layers: int | None) -> str:
    """Return the name in a cache of a shape with so many layers; None: all layers."""
    return shape if layers is None else f"{shape}-{layers}"


def calibrated(cache: Path, name: str, config: Config, calibration: Calibration) -> RaceModel:
    """Return the model of `config` with such an embedding; write it below `cache` if absent."""
    name = f"{name}-{calibration.name}"
    path = cache / "given" / f"{name}-embedding.bin"
    if not path.exists():
        vocab, hidden = config["vocab_size"], config["hidden_size"]
        path.parent.mkdir(parents=True, exist_ok=True)
        check_space(path.parent, 2 * vocab * hidden)
        partial = path.with_suffix(".partial")
        with partial.open("wb") as file:
            for first in range(0, vocab, _ROWS):
                rows = embeddings(calibration, first, min(_ROWS, vocab - first), hidden)
                bfloat16(rows).tofile(file)
        partial.rename(path)
    return RaceModel(cache, name, config, {EMBEDDING: path})


def bfloat16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Return the bfloat16 bits of `values`, rounded to nearest, ties to even."""
    bits = np.ascontiguousarray(values).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)
