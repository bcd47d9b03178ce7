"""Define the options that several commands share, and parse their text into values."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer

from moeinf.native import MAX_COMPUTE_THREADS
from moeinf.offload.gpu_tier.miss_split import MISSES, Miss
from moeinf.offload.policy.names import POLICY_NAMES
from moeinf.runtime.config import (
    KV,
    Q2_ON_MISS,
    WANTED,
    EngineConfig,
    Kv,
    Settings,
    Wanted,
    parse_duration,
    parse_kv,
    read_environment,
)
from moeinf.runtime.engine.pipeline.address import parse_address
from moeinf.runtime.invalid import InvalidValue
from moeinf.runtime.library.library import Library
from moeinf.runtime.names import DEMO, TAGS, BadName, parse_name
from moeinf.runtime.sizes import MemorySize, parse_memory

_PICTURES = (".png", ".jpg", ".pdf", ".svg")


def _memory(text: str) -> MemorySize:
    try:
        return parse_memory(text)
    except InvalidValue as error:
        raise typer.BadParameter(str(error)) from error


_AUTO_MEMORY = MemorySize()  # what `--memory auto` becomes; None is an option that is not given


def _memory_or_auto(text: str) -> MemorySize:
    return _AUTO_MEMORY if text.strip() == "auto" else _memory(text)


def memory_or_auto(text: str) -> str:
    """Return the text of a memory size, or `auto`, which a server parses again."""
    if text.strip() != "auto":
        _memory(text)
    return text


def _duration(text: str) -> float:
    try:
        return parse_duration(text)
    except InvalidValue as error:
        raise typer.BadParameter(str(error).removeprefix("keep_alive: ")) from error


_AUTO_THREADS = 0  # what `--threads auto` becomes


def _threads(text: str) -> int:
    if text == "auto":
        return _AUTO_THREADS
    if text.isdecimal() and 1 <= int(text) <= MAX_COMPUTE_THREADS:
        return int(text)
    raise typer.BadParameter(f"{text!r} is neither auto nor from 1 to {MAX_COMPUTE_THREADS}")


def _device(text: str) -> Wanted:
    for name in WANTED:
        if text == name:
            return name
    raise typer.BadParameter(f"{text!r} is not one of {', '.join(WANTED)}")


def _miss(text: str) -> Miss:
    for name in MISSES:
        if text == name:
            return name
    raise typer.BadParameter(f"{text!r} is not one of {', '.join(MISSES)}")


def _kv(text: str) -> Kv:
    try:
        return parse_kv(text)
    except InvalidValue as error:
        raise typer.BadParameter(str(error)) from error


def _cache_aware(text: str) -> float:
    """Return LAMBDA of cache-aware=LAMBDA; the configuration checks its range."""
    name, _, value = str(text).partition("=")
    try:
        if name == "cache-aware":
            return float(value)
    except ValueError:
        pass
    raise typer.BadParameter(f"{text!r} is not cache-aware=LAMBDA, such as cache-aware=0.2")


def _experts(text: str) -> float | None:
    """Return the share above which copies in q2 are used; None: never."""
    name, _, share = text.partition("=")
    if text == "full":
        return None
    with suppress(ValueError):
        if name == "q2-on-miss":
            return float(share) if share else Q2_ON_MISS
    raise typer.BadParameter(f"{text!r} is neither full nor q2-on-miss[=SHARE]")


def _stages(settings: Settings, text: str | None) -> tuple[str, ...]:
    """Return the addresses of stages, one or more. Raises InvalidValue."""
    found = () if text is None else tuple(part.strip() for part in text.split(","))
    for part in found:
        parse_address("--experimental-pipeline", part, settings.stage_key)
    return found


def policy_name(text: str) -> str:
    """Return the name if a policy has it. Raises BadParameter."""
    if text not in POLICY_NAMES:
        raise typer.BadParameter(f"{text!r} is not one of {', '.join(POLICY_NAMES)}")
    return text


def picture_path(text: str) -> Path:
    """Return the path of a picture in a format that can be drawn. Raises BadParameter."""
    path = Path(text)
    if path.suffix.lower() not in _PICTURES:
        raise typer.BadParameter(f"{text!r} does not end in {', '.join(_PICTURES)}")
    return path


def is_name(text: str) -> bool:
    """Return True for a name that a model can have."""
    with suppress(BadName):
        return bool(parse_name(text))
    return False


def installed_models(incomplete: str) -> list[str]:
    """Return installed models for shell completion; with tags once a colon is typed.

    Raises nothing, because a shell would print the error into the line. bash treats the colon as
    the start of a new word.
    """
    try:
        found = Library(read_environment()).installed()
        names = [entry.name for entry in found if is_name(str(entry.name))]
    except (OSError, InvalidValue):
        return []
    words = {str(name) if ":" in incomplete else name.name for name in names}
    return sorted(word for word in words if word.startswith(incomplete.lower()))


def known_models(incomplete: str) -> list[str]:
    """Return installed models and short names that can be pulled, for shell completion."""
    from moeinf.runtime.hub.aliases import registry

    known = {DEMO, *registry()}
    if ":" in incomplete:
        known = {f"{name}:{tag}" for name in known for tag in TAGS}
    here = installed_models(incomplete)
    return sorted({*here, *(name for name in known if name.startswith(incomplete.lower()))})


InstalledModel = Annotated[
    str,
    typer.Argument(metavar="MODEL[:TAG]", show_default=False, autocompletion=installed_models),
]
Model = Annotated[
    str,
    typer.Argument(metavar="MODEL[:TAG]", show_default=False, autocompletion=known_models),
]
PlannedModel = Annotated[
    str,
    typer.Argument(
        metavar="MODEL[:TAG] | ./FOLDER", show_default=False, autocompletion=known_models
    ),
]
Json = Annotated[bool, typer.Option("--json", help="One JSON document on stdout, nothing else.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress, no notes.")]
AllColumns = Annotated[bool, typer.Option("--verbose", help="All columns.")]
Memory = Annotated[
    MemorySize | None,
    typer.Option(
        parser=_memory_or_auto,
        metavar="SIZE|auto",
        help="RAM for experts: 6MiB, 4GB, or 50% of all experts. Default: auto, the free RAM.",
        show_default=False,
    ),
]
Context = Annotated[
    int | None, typer.Option("--ctx", min=16, help="Context length in tokens.", show_default=False)
]
PolicyName = Annotated[
    str,
    typer.Option(
        "--policy",
        parser=policy_name,
        metavar="NAME",
        help="Which expert is evicted: adaptive, eamc, lfu, lru, … (docs/cli.md).",
    ),
]
Device = Annotated[
    Wanted,
    typer.Option(
        parser=_device,
        metavar="|".join(WANTED),
        help="Where to compute; auto is the CPU: choose a GPU with cuda.",
    ),
]
DeviceMemory = Annotated[
    MemorySize | None,
    typer.Option(
        parser=_memory,
        metavar="SIZE",
        help="With --device cuda: GPU memory to use at most: 6GiB, 50%. "
        "Default: the free GPU memory minus 256 MiB.",
        show_default=False,
    ),
]
OnMiss = Annotated[
    Miss,
    typer.Option(
        "--miss",
        parser=_miss,
        metavar="|".join(MISSES),
        help="With --device cuda: compute missing experts on the CPU, copy them up, or both.",
    ),
]
SkipBelow = Annotated[
    float,
    typer.Option(
        "--skip-below",
        metavar="SHARE",
        help="Lossy: skip missing experts below this share of a token's gate weights: 0.03.",
        show_default=False,
    ),
]
Route = Annotated[
    float | None,
    typer.Option(
        "--route",
        parser=_cache_aware,
        metavar="cache-aware=LAMBDA",
        help="Lossy: add this share of the router logits' range to experts in memory: 0.2.",
        show_default=False,
    ),
]
Experts = Annotated[
    float | None,
    typer.Option(
        "--experts",
        parser=_experts,
        metavar="full|q2-on-miss[=SHARE]",
        help="Lossy: compute a missing expert from the model's q2 tag, if experts with larger "
        "gate weights have more than this share of the token's total. Default share: 0.6.",
        show_default=False,
    ),
]
KvForm = Annotated[
    Kv | None,
    typer.Option(
        "--kv",
        parser=_kv,
        metavar="|".join(KV),
        help="KV cache: full, in the model's bf16 or f32, or q8, in about half the bytes of bf16. "
        "Default: MOEINF_KV, else full.",
        show_default=False,
    ),
]
KeepAlive = Annotated[
    float | None,
    typer.Option(
        "--keepalive",
        parser=_duration,
        metavar="DURATION",
        help="How long the server keeps the model loaded after an answer: 10m, 0, -1 for ever. "
        "Default: MOEINF_KEEP_ALIVE, else 5m.",
        show_default=False,
    ),
]
Source = Annotated[
    str | None,
    typer.Option("--src", help="Language to translate from, such as eng_Latn.", show_default=False),
]
Target = Annotated[
    str | None,
    typer.Option("--tgt", help="Language to translate to, such as fra_Latn.", show_default=False),
]
Threads = Annotated[
    int | None,
    typer.Option(
        parser=_threads,
        metavar="N|auto",
        help="Compute threads; auto tries other numbers while decoding and keeps the fastest.",
        show_default=False,
    ),
]
NoTrace = Annotated[
    bool,
    typer.Option("--no-trace", help="Record nothing about this run: no routing, speed or date."),
]
Reproducible = Annotated[
    bool,
    typer.Option(
        "--reproducible",
        help="Reuse only whole chunks of prompts: answers do not depend on earlier requests.",
    ),
]
NoPrefixCache = Annotated[
    bool,
    typer.Option("--no-prefix-cache", help="Keep no KV cache for later requests."),
]
NoSpeculation = Annotated[
    bool,
    typer.Option("--no-speculation", help="No speculative decoding: decode one token per pass."),
]


NoMtp = Annotated[
    bool,
    typer.Option("--no-mtp", help="Do not draft tokens with multi-token prediction layers."),
]
DraftModel = Annotated[
    str | None,
    typer.Option(
        "--draft",
        metavar="MODEL",
        help="Draft tokens with this smaller model; the answer does not change.",
        autocompletion=installed_models,
        show_default=False,
    ),
]


PipelineStages = Annotated[
    str | None,
    typer.Option(
        "--experimental-pipeline",
        metavar="HOST:PORT,…",
        help="Compute the remaining layers in `moeinf stage` processes at these addresses.",
        show_default=False,
    ),
]


def engine_config(
    settings: Settings,
    memory: MemorySize | None,
    context: int | None,
    policy: str,
    threads: int | None,
    trace: bool = True,
    device: Wanted = "auto",
    device_memory: MemorySize | None = None,
    miss: Miss = "auto",
    reproducible: bool = False,
    prefix_cache: bool = False,
    skip_below: float = 0.0,
    cache_aware: float = 0.0,
    experts: float | None = None,
    speculation: bool = True,
    kv: Kv | None = None,
    draft: str | None = None,
    mtp: bool = True,
    pipeline: str | None = None,
) -> EngineConfig:
    """Return the configuration: options override the environment, which overrides defaults."""
    memory = memory or settings.memory
    return EngineConfig(
        memory=None if memory == _AUTO_MEMORY else memory,
        context=context,
        policy=policy,
        threads=threads or None,
        tune_threads=threads == _AUTO_THREADS,
        trace=trace,
        device=device,
        device_memory=device_memory,
        miss=miss,
        skip_below=skip_below,
        cache_aware=cache_aware,
        q2_on_miss=experts,
        kv=kv or settings.kv,
        libcuda=settings.libcuda,
        reproducible=reproducible,
        prefix=settings.prefix if prefix_cache else None,
        speculation=speculation,
        draft=draft,
        mtp=mtp,
        stages=_stages(settings, pipeline),
    )
