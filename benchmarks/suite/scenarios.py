"""The scenarios of the suite: places, lengths, batches, and three moments of a conversation."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from itertools import product
from typing import Any, Literal

from benchmarks.peers.table import Place

# warm: the files have been read; cold: the process has just started, its files are not in the page
# cache, and the time to first token counts from its imports on; second: the second turn of a
# conversation, after a first turn with the scenario's prompt and answer.
Moment = Literal["warm", "cold", "second"]
SHARES = (60, 35, 18, 10)
PROMPTS, DECODES, BATCHES = (32, 512, 4096), (32, 256), (1, 2, 4)
SECOND_PROMPT = 32


@dataclass(frozen=True)
class Scenario:
    """One scenario. memory, gpu: per cent of the experts that fit; None: no limit, no GPU."""

    memory: int | None = None
    gpu: int | None = None
    prompt: int = 512
    decode: int = 32
    batch: int = 1
    moment: Moment = "warm"

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> Scenario:
        """Return the scenario of a row of results."""
        return cls(**{one.name: row[one.name] for one in fields(cls)})

    @property
    def place(self) -> Place:
        if self.gpu is not None:
            return "gpu"
        return "ram" if self.memory is None else "limited"

    @property
    def where(self) -> str:
        """The place in words."""
        if self.gpu is not None:
            return f"GPU {self.gpu} %"
        return "RAM" if self.memory is None else f"memory {self.memory} %"

    @property
    def name(self) -> str:
        return f"{self.where}, {self.prompt}+{self.decode}, batch {self.batch}, {self.moment}"

    @property
    def context(self) -> int:
        """All tokens of one conversation."""
        second = SECOND_PROMPT + self.decode if self.moment == "second" else 0
        return self.prompt + self.decode + second + 8


def default() -> list[Scenario]:
    """Return scenarios for 70 minutes: each size is varied alone, around 512 + 32 tokens."""
    ram = [
        Scenario(),
        Scenario(prompt=32),
        Scenario(prompt=32, decode=256),
        Scenario(decode=256),
        Scenario(prompt=4096),
        Scenario(batch=2),
        Scenario(batch=4),
        Scenario(prompt=32, moment="cold"),
        Scenario(moment="second"),
    ]
    limited = [Scenario(memory=share) for share in SHARES]
    limited += [
        Scenario(memory=35, prompt=32, decode=256),
        Scenario(memory=35, batch=2),
        Scenario(memory=35, prompt=32, moment="cold"),
        Scenario(memory=35, moment="second"),
    ]
    return [*ram, *limited, Scenario(gpu=60), Scenario(gpu=35), Scenario(gpu=10)]


def quick() -> list[Scenario]:
    """Return every kind once, short, to check that everything works."""
    short = {"prompt": 32, "decode": 8}
    kinds = (
        {},
        {"batch": 2},
        {"moment": "cold"},
        {"moment": "second"},
        {"memory": 35},
        {"gpu": 35},
    )
    return [Scenario(**short, **kind) for kind in kinds]  # type: ignore[arg-type]


def everything() -> list[Scenario]:
    """Return the full product."""
    return list(_product())


def _product() -> Iterator[Scenario]:
    moments: tuple[Moment, ...] = ("warm", "cold", "second")
    places = [(None, None), *((share, None) for share in SHARES), *((None, s) for s in SHARES)]
    for (memory, gpu), prompt, decode, batch, moment in product(
        places, PROMPTS, DECODES, BATCHES, moments
    ):
        yield Scenario(memory, gpu, prompt, decode, batch, moment)
