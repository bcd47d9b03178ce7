"""Settings of this process: the one file that reads environment variables."""

from __future__ import annotations

import ipaddress
import math
import os
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeVar, get_args

from moeinf.errors import InvalidInput
from moeinf.offload.gpu_tier.miss_split import Miss
from moeinf.offload.policy.names import DEFAULT_POLICY
from moeinf.runtime.invalid import InvalidValue
from moeinf.runtime.names import ModelName, expand
from moeinf.runtime.sizes import MemorySize, parse_memory_or_auto, parse_size

Size = TypeVar("Size", int, None)
Wanted = Literal["auto", "cpu", "cuda"]  # the values of --device
WANTED: tuple[Wanted, ...] = get_args(Wanted)
Kv = Literal["full", "q8"]  # the values of --kv; models.base.KvForm, without torch
KV: tuple[Kv, ...] = get_args(Kv)
MOST_PARALLEL = 16  # rows of a pass whose results do not depend on each other
_MOST_DURATION = 64  # characters
_PIECE = re.compile(r"(\d++(?:\.\d++)?)(ms|h|m|s)")
_DURATION = re.compile(rf"-?(?:{_PIECE.pattern})++")
_UNIT_SECONDS = {"ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
PREFILL_CHUNK = 256  # tokens; constant, because results must not depend on the budget
MOST_WINDOW = 8192  # tokens of a prompt that go through a layer before the next


@dataclass(frozen=True)
class PrefixBudget:
    """The bytes that the KV of ended requests may take; memory_bytes None: the plan decides."""

    memory_bytes: int | None = None
    disk_bytes: int = 4 << 30  # of one model; 0: none is written


@dataclass(frozen=True)
class Settings:
    """The settings from the environment. See docs/cli.md, "Environment"."""

    home: Path
    memory: MemorySize | None = None
    kv: Kv = "full"
    debug: bool = False
    libcuda: str | None = None  # its path, if the system does not find it
    graphs: bool = False  # CUDA graphs with a torch that leaks after a failed capture
    prefix: PrefixBudget = PrefixBudget()
    stage_key: str | None = None  # of a pipeline
    more_homes: tuple[Path, ...] = ()  # of other drives, for a share of each model's experts

    @property
    def homes(self) -> str:
        """The value of MOEINF_HOME."""
        return os.pathsep.join(map(str, (self.home, *self.more_homes)))

    @property
    def models(self) -> Path:
        return self.home / "models"

    @property
    def run(self) -> Path:
        return self.home / "run"

    def state_of(self, model: ModelName) -> Path:
        """Return the folder of a model's EAMC, measured speeds and time of last use."""
        return self.home / "state" / model.name / model.tag

    @property
    def datasets(self) -> Path:
        return self.home / "datasets"

    @property
    def conversations(self) -> Path:
        return self.home / "conversations"

    @property
    def logs(self) -> Path:
        return self.home / "logs"

    @property
    def history(self) -> Path:
        return self.home / "history"


def read_environment(environment: Mapping[str, str] | None = None) -> Settings:
    """Read the variables of docs/cli.md that no server needs. Raises InvalidValue."""
    env = os.environ if environment is None else environment
    home, *more = _homes(env.get("MOEINF_HOME") or "~/.moeinf")
    memory = env.get("MOEINF_MEMORY")
    return Settings(
        home=home,
        more_homes=tuple(more),
        memory=_memory(memory) if memory else None,
        kv=_kv(env.get("MOEINF_KV") or "full"),
        debug=env.get("MOEINF_DEBUG", "") not in ("", "0"),
        libcuda=env.get("MOEINF_LIBCUDA") or None,
        graphs=env.get("MOEINF_GRAPHS", "") not in ("", "0"),
        stage_key=env.get("MOEINF_STAGE_KEY") or None,
        prefix=PrefixBudget(
            _size(env, "MOEINF_PREFIX_MEMORY", None),
            _size(env, "MOEINF_PREFIX_DISK", PrefixBudget.disk_bytes),
        ),
    )


def _homes(text: str) -> list[Path]:
    try:
        homes = [Path(part).expanduser().absolute() for part in text.split(os.pathsep) if part]
    except RuntimeError as error:  # no such user, or this user has no home
        raise _bad_homes(text, "a user has no home for ~; expected folders") from error
    if not homes or len(set(homes)) < len(homes):
        raise _bad_homes(text, "expected different folders")
    return homes


def _bad_homes(text: str, why: str) -> InvalidValue:
    error = InvalidValue(f"MOEINF_HOME: {text} is invalid ({why})")
    error.hint = "`export MOEINF_HOME=/a/folder`"
    return error


@dataclass(frozen=True)
class OtherStores:
    """The folders in which other programs keep GGUF files. They need not exist."""

    ollama: tuple[Path, ...]
    lm_studio: tuple[Path, ...]
    llama_cpp: tuple[Path, ...]


def read_other_stores(environment: Mapping[str, str] | None = None) -> OtherStores:
    """Read HOME, OLLAMA_MODELS, LLAMA_CACHE and XDG_CACHE_HOME, as those programs do."""
    env = os.environ if environment is None else environment
    home = expand(env.get("HOME") or "~")
    chosen = env.get("OLLAMA_MODELS")
    both = (home / ".ollama/models", Path("/usr/share/ollama/.ollama/models"))
    cache = Path(env.get("XDG_CACHE_HOME") or home / ".cache")
    return OtherStores(
        ollama=(expand(chosen),) if chosen else both,
        lm_studio=(home / ".lmstudio/models", home / ".cache/lm-studio/models"),
        llama_cpp=(expand(env.get("LLAMA_CACHE") or str(cache / "llama.cpp")),),
    )


@dataclass(frozen=True)
class ServerSettings:
    """The options of `moeinf serve`: its address, its limits and the sharing of its engines.

    keep_alive_s  seconds that an idle model stays loaded; infinite: it is never unloaded
    max_queue     requests that may wait for an engine; one more is answered 503
    parallel      requests that decode together, each with a KV cache of its own
    origins       web pages' origins that may call, beside those of this machine; * is any
    context_shift  drop the oldest turns of a chat that does not fit; else it is answered 400
    autostart     True: `run` starts a server in the background when none listens at the address
    verbose       write a line per request
    """

    host: str = "127.0.0.1"
    port: int = 11435
    keep_alive_s: float = 300.0
    max_queue: int = 512
    parallel: int = 1
    origins: tuple[str, ...] = ()
    api_key: str | None = None
    context_shift: bool = False
    autostart: bool = True
    verbose: bool = False

    @property
    def on_loopback(self) -> bool:
        """True if no other machine or container can reach the address."""
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host.lower() == "localhost"


def read_server_environment(environment: Mapping[str, str] | None = None) -> ServerSettings:
    """Read MOEINF_HOST and the variables that docs/server.md names. Raises InvalidValue."""
    env = os.environ if environment is None else environment
    given = ServerSettings()
    host, port = _address(env.get("MOEINF_HOST") or "", given)
    parallel, most = _count(env, "MOEINF_NUM_PARALLEL", given.parallel), MOST_PARALLEL
    if parallel > most:
        raise InvalidValue(f"MOEINF_NUM_PARALLEL: {parallel} is invalid (expected at most {most})")
    keep_alive = env.get("MOEINF_KEEP_ALIVE")
    return ServerSettings(
        host=host,
        port=port,
        keep_alive_s=parse_duration(keep_alive) if keep_alive else given.keep_alive_s,
        max_queue=_count(env, "MOEINF_MAX_QUEUE", given.max_queue),
        parallel=parallel,
        origins=tuple(o.strip() for o in env.get("MOEINF_ORIGINS", "").split(",") if o.strip()),
        api_key=env.get("MOEINF_API_KEY") or None,
        context_shift=env.get("MOEINF_CONTEXT_SHIFT", "") not in ("", "0"),
        autostart=env.get("MOEINF_NO_SERVER", "") in ("", "0"),
    )


def parse_duration(text: str | float) -> float:
    """Return the seconds of "5m", "1h30m", "10s", "250ms" or a number; negative: infinite.

    Infinite means that a model stays loaded. Raises InvalidValue.
    """
    if isinstance(text, str) and len(text) <= _MOST_DURATION and _DURATION.fullmatch(text):
        pieces = _PIECE.findall(text)
        seconds = sum(float(number) * _UNIT_SECONDS[unit] for number, unit in pieces)
        return math.inf if text.startswith("-") else seconds
    if not isinstance(text, str) or len(text) <= _MOST_DURATION:
        with suppress(ValueError, OverflowError):
            number = float(text)
            if not math.isnan(number):
                return number if number >= 0 else math.inf
    words = text[:_MOST_DURATION] if isinstance(text, str) else "a number"
    raise InvalidValue(f"keep_alive: {words!r} is invalid (expected 30s, 5m, 1h30m or seconds)")


def _address(text: str, given: ServerSettings) -> tuple[str, int]:
    """Parse HOST, HOST:PORT, :PORT, [V6]:PORT, with or without http:// before it."""
    rest = text.removeprefix("http://").rstrip("/")
    host, colon, port = rest.rpartition(":")
    if not colon or rest.endswith("]") or (":" in host and not host.startswith("[")):
        host, port = rest, ""
    if port and not (port.isdecimal() and len(port) <= 5 and int(port) < 1 << 16):
        raise InvalidValue(f"MOEINF_HOST: {text[:80]!r} is invalid (expected HOST or HOST:PORT)")
    return host.strip("[]") or given.host, int(port) if port else given.port


def _count(env: Mapping[str, str], name: str, default: int) -> int:
    text = env.get(name)
    if not text:
        return default
    if not text.isdecimal() or len(text) > 9 or int(text) < 1:
        raise InvalidValue(f"{name}: {text[:80]!r} is invalid (expected a number from 1)")
    return int(text)


def _size(env: Mapping[str, str], name: str, default: Size) -> int | Size:
    try:
        return parse_size(env[name]) if env.get(name) else default
    except InvalidValue as error:
        raise InvalidValue(f"{name}: {error}") from error


def parse_kv(text: str) -> Kv:
    """Return the form of the KV cache that a text names. Raises InvalidValue."""
    for form in KV:
        if text == form:
            return form
    raise InvalidValue(f"{text[:80]!r} is invalid (expected {' or '.join(KV)})")


def _kv(text: str) -> Kv:
    try:
        return parse_kv(text)
    except InvalidValue as error:
        raise InvalidValue(f"MOEINF_KV: {error}") from error


def _memory(text: str) -> MemorySize | None:
    try:
        return parse_memory_or_auto(text)
    except InvalidValue as error:
        raise InvalidValue(f"MOEINF_MEMORY: {error}") from error


TABLE_BYTES = 64 << 20
Q2_ON_MISS = 0.6  # the default of --experts q2-on-miss


@dataclass(frozen=True)
class EngineConfig:
    """The options of one engine. Built once, by the command line or the server.

    memory     RAM for experts, in bytes or as a share of all experts; None: the free memory
    context    tokens of KV cache; None: the model's usual context, if the plan has room for it
    readers    reads in flight, and direct_io whether they bypass the page cache; None: the
               measured best
    tune_threads  try fewer of the threads while decoding, and keep the fastest number
    parallel   requests that decode together, each with a KV cache of its own
    trace      True: add the routing to the model's EAMC; False: record nothing
    device     the processor that computes experts, device_memory the part of its memory to use
    miss       how an expert outside the device's memory is computed
               (offload/gpu_tier/layer_runner.py)
    skip_below lossy: a decoded token does without an absent expert below this share of its gate
               weights (offload/store/lossy/skipping.py); 0: never
    cache_aware  lossy: a decoded token prefers experts in memory by this part of the range of its
               logits (models/layers/cache_aware.py); 0: never
    q2_on_miss lossy: a decoded token computes an absent expert with a copy in q2 if the experts of
               larger weight have more than this share (offload/store/lossy); None: never
    kv         form of the KV cache: full, in the model's bf16 or f32, or q8
               (models/layers/kv_q8.py)
    libcuda    the driver's library, if the system does not find it
    window     tokens of a prompt that go through a layer before the next layer, rounded down to
               chunks of PREFILL_CHUNK; None: what a share of the memory holds (placement/plan.py)
    reproducible  reuse only what a prompt's own prefill would write bit for bit: whole chunks
    prefix     keep the KV of ended requests (runtime/prefix); None: do not
    speculation  check tokens that the text itself suggests, several in a pass (runtime/generation/
               lookup.py); the answer is the same without
    table_bytes  RAM for tables whose rows are on disk (offload/store/table_cache.py), all together
    draft      another model with the same vocabulary, which suggests tokens, too
    stages     HOST:PORT of the processes with the further layers (runtime/engine/pipeline)
    mtp        let the model's layers for multi-token prediction suggest them, without `draft`
    """

    memory: MemorySize | None = None
    context: int | None = None
    policy: str = DEFAULT_POLICY
    readers: int | None = None
    direct_io: bool | None = None
    threads: int | None = None
    tune_threads: bool = False
    parallel: int = 1
    trace: bool = True
    device: Wanted = "auto"
    device_memory: MemorySize | None = None
    miss: Miss = "auto"
    skip_below: float = 0.0
    cache_aware: float = 0.0
    q2_on_miss: float | None = None
    kv: Kv = "full"
    table_bytes: int = TABLE_BYTES
    libcuda: str | None = None
    window: int | None = None
    reproducible: bool = False
    prefix: PrefixBudget | None = None
    speculation: bool = True
    draft: str | None = None
    stages: tuple[str, ...] = ()
    mtp: bool = True

    def __post_init__(self) -> None:
        if self.window is not None and self.window < PREFILL_CHUNK:
            raise InvalidValue(f"the window must be at least {PREFILL_CHUNK} tokens")
        if self.context is not None and self.context < 1:
            raise InvalidValue(f"--ctx must be at least 1, got {self.context}")
        if any(number is not None and number < 1 for number in (self.readers, self.threads)):
            raise InvalidValue("readers and threads must be at least 1")
        for option, value, known in (("device", self.device, WANTED), ("kv", self.kv, KV)):
            if value not in known:
                words = f"(expected {', '.join(known)})"
                raise InvalidValue(f"--{option}: {value!r} is invalid {words}")
        if not 0 <= self.skip_below < 1:
            raise InvalidValue(
                f"--skip-below: {self.skip_below} is invalid (expected at least 0, less than 1)"
            )
        if not 0 <= self.cache_aware <= 1:
            raise InvalidValue(
                f"--route: cache-aware={self.cache_aware} is invalid (expected from 0 to 1)"
            )
        if self.q2_on_miss is not None and not 0 <= self.q2_on_miss < 1:
            raise InvalidValue(
                f"--experts: q2-on-miss={self.q2_on_miss} is invalid (expected at least 0, less "
                "than 1)"
            )
        if self.kv == "q8" and self.device == "cuda":
            raise InvalidValue("--kv q8 cannot be combined with --device cuda")
        if self.draft is not None:
            others = lossy_options(self.lossy) if self.speculation else ["--no-speculation"]
            if others:
                raise InvalidValue(f"--draft cannot be combined with {others[0]}")
        for option in lossy_options(self.lossy):
            if self.device == "cuda":
                raise InvalidValue(f"{option} cannot be combined with --device cuda")
            if self.reproducible:
                raise LossyReproducible(f"{option} cannot be combined with --reproducible")

    @property
    def lossy(self) -> Mapping[str, float]:
        """The options by which residency chooses the result, by field; empty: none is set."""
        found = {"skip_below": self.skip_below, "cache_aware": self.cache_aware}
        if self.q2_on_miss is not None:
            return {**found, "q2_on_miss": self.q2_on_miss}
        return found if any(found.values()) else {}


def lossy_options(lossy: Mapping[str, float]) -> list[str]:
    """Return the lossy options that are set, as on the command line."""
    words = {
        "skip_below": "--skip-below {:g}",
        "cache_aware": "--route cache-aware={:g}",
        "q2_on_miss": "--experts q2-on-miss={:g}",
    }
    return [
        words[name].format(value) for name, value in lossy.items() if value or name == "q2_on_miss"
    ]


class LossyReproducible(InvalidInput):
    """A lossy option cannot be combined with --reproducible: its result depends on the cache."""

    code = "lossy_reproducible"
    hint = "the same command without --reproducible, or without the lossy option"
