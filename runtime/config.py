"""Settings of this process: the one file that reads environment variables.

Does not know models, commands or defaults that depend on the machine's free memory.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from moeinf.runtime.names import ModelName
from moeinf.runtime.sizes import MemorySize, parse_memory

PREFILL_CHUNK = 256  # tokens; a constant of the engine: results must not depend on the budget


@dataclass(frozen=True)
class Settings:
    """What the environment says. See README, "Environment"."""

    home: Path
    memory: MemorySize | None = None
    debug: bool = False

    @property
    def models(self) -> Path:
        return self.home / "models"

    @property
    def run(self) -> Path:
        return self.home / "run"

    def state_of(self, model: ModelName) -> Path:
        """What grows by using a model: its EAMC, measured speeds, when it was used last."""
        return self.home / "state" / model.name / model.tag

    @property
    def datasets(self) -> Path:
        return self.home / "datasets"

    @property
    def conversations(self) -> Path:
        return self.home / "conversations"

    @property
    def history(self) -> Path:
        return self.home / "history"


def read_environment(environment: Mapping[str, str] | None = None) -> Settings:
    """MOEINF_HOME, MOEINF_MEMORY and MOEINF_DEBUG. Raises ValueError for a size that is none."""
    env = os.environ if environment is None else environment
    home = Path(env.get("MOEINF_HOME") or "~/.moeinf").expanduser().absolute()
    memory = env.get("MOEINF_MEMORY")
    return Settings(
        home=home,
        memory=_memory(memory) if memory else None,
        debug=env.get("MOEINF_DEBUG", "") not in ("", "0"),
    )


def _memory(text: str) -> MemorySize:
    try:
        return parse_memory(text)
    except ValueError as error:
        raise ValueError(f"MOEINF_MEMORY: {error}") from error


@dataclass(frozen=True)
class EngineConfig:
    """How one engine is to run. Built once, in a face.

    memory    RAM for experts, in bytes or as a share of all experts; None: what is free
    context   tokens of KV cache; None: what the model has and the plan affords
    readers   reads in flight, and direct_io whether past the page cache; None: as was measured best
    trace     whether what is routed goes into the model's EAMC; without, nothing is noted at all
    """

    memory: MemorySize | None = None
    context: int | None = None
    policy: str = "lru"
    readers: int | None = None
    direct_io: bool | None = None
    threads: int | None = None
    trace: bool = True

    def __post_init__(self) -> None:
        if self.context is not None and self.context < 1:
            raise ValueError(f"a context of {self.context} tokens is none")
        if any(number is not None and number < 1 for number in (self.readers, self.threads)):
            raise ValueError("readers and threads are at least 1")
