"""Define `moeinf run`: print one answer, or hold a conversation."""

from __future__ import annotations

import os
import stat
import sys
from dataclasses import dataclass
from typing import Annotated

import typer

from moeinf.cli.chat.backends import Partner, cut_off, parse_form
from moeinf.cli.chat.background import Service
from moeinf.cli.chat.client import ServerError
from moeinf.cli.chat.remote import RemotePartner
from moeinf.cli.chat.server_check import Found, look
from moeinf.cli.chat.signals import interruptible, stoppable
from moeinf.cli.chat.waiting import awaited
from moeinf.cli.commands.measuring.plan import print_plan
from moeinf.cli.commands.models.pull import ensure
from moeinf.cli.errors import Usage
from moeinf.cli.imports import uncollected
from moeinf.cli.options import (
    Context,
    Device,
    DeviceMemory,
    DraftModel,
    Experts,
    Json,
    KeepAlive,
    KvForm,
    Memory,
    Model,
    NoMtp,
    NoPrefixCache,
    NoSpeculation,
    NoTrace,
    OnMiss,
    PipelineStages,
    PolicyName,
    Quiet,
    Reproducible,
    Route,
    SkipBelow,
    Source,
    Target,
    Threads,
    engine_config,
)
from moeinf.cli.output import Output
from moeinf.offload.policy.names import DEFAULT_POLICY
from moeinf.runtime.config import Settings, read_environment, read_server_environment
from moeinf.runtime.names import DEMO, DEMO_EXAMPLES
from moeinf.runtime.placement.decode_speed import remember_prefill, remember_speed
from moeinf.runtime.requests import Form, Limits, SamplingOptions
from moeinf.runtime.text.reasoning import thinks

_INTERRUPTED = 130
Stop = Annotated[
    list[str] | None,
    typer.Option(help="Stop before this text; may be repeated.", show_default=False),
]


def run(
    model: Model,
    words: Annotated[list[str] | None, typer.Argument(metavar="PROMPT", show_default=False)] = None,
    memory: Memory = None,
    device: Device = "auto",
    device_memory: DeviceMemory = None,
    miss: OnMiss = "auto",
    policy: PolicyName = DEFAULT_POLICY,
    skip_below: SkipBelow = 0.0,
    route: Route = None,
    experts: Experts = None,
    kv: KvForm = None,
    ctx: Context = None,
    temperature: Annotated[float | None, typer.Option(help="0 is greedy.")] = None,
    top_k: Annotated[
        int | None, typer.Option(help="Sample from the k best tokens; 0: all.")
    ] = None,
    top_p: Annotated[
        float | None,
        typer.Option(help="Sample from the best tokens whose probabilities sum to this."),
    ] = None,
    min_p: Annotated[
        float | None,
        typer.Option(help="Drop tokens below this share of the best token's probability."),
    ] = None,
    seed: Annotated[int | None, typer.Option(help="The same seed gives the same text.")] = None,
    max_tokens: Annotated[int | None, typer.Option(min=0, help="Most tokens of an answer.")] = None,
    stop: Stop = None,
    system: Annotated[str, typer.Option(help="The system message.", show_default=False)] = "",
    format: Annotated[
        str | None,
        typer.Option(
            metavar="json|SCHEMA",
            help="Answer in JSON: `json`, or a JSON schema (its text or a file).",
            show_default=False,
        ),
    ] = None,
    src: Source = None,
    tgt: Target = None,
    raw: Annotated[
        bool, typer.Option("--raw", help="Send the prompt without the chat template.")
    ] = False,
    think: Annotated[
        bool | None, typer.Option("--think/--nothink", help="Think before answering, or do not.")
    ] = None,
    hidethinking: Annotated[
        bool, typer.Option("--hidethinking", help="Show only the answer.")
    ] = False,
    nowordwrap: Annotated[
        bool, typer.Option("--nowordwrap", help="Do not wrap words at a terminal's edge.")
    ] = False,
    now: Annotated[str | None, typer.Option(hidden=True, help="The date templates see.")] = None,
    threads: Threads = None,
    reproducible: Reproducible = False,
    no_prefix_cache: NoPrefixCache = False,
    no_speculation: NoSpeculation = False,
    draft: DraftModel = None,
    no_mtp: NoMtp = False,
    experimental_pipeline: PipelineStages = None,
    no_trace: NoTrace = False,
    server: Annotated[
        bool | None,
        typer.Option(
            "--server/--no-server",
            help="Use the server at MOEINF_HOST with MOEINF_API_KEY, or run the model in this "
            "process. Default: your own server, which is started if none listens.",
            show_default=False,
        ),
    ] = None,
    keepalive: KeepAlive = None,
    verbose: Annotated[
        bool, typer.Option("--verbose", help="Print timings, hit rate, bytes read.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the plan and load nothing.")
    ] = False,
    json: Json = False,
    quiet: Quiet = False,
) -> int:
    """Run a model: answer PROMPT (or piped text) once, or hold a conversation.

    A background server keeps the model loaded for the next run, and ends when it is idle. Options
    that need a separate engine, such as --memory, run the model in this process.

    Example: moeinf run demo --memory 30% --verbose "17+25="
    """
    out, settings = Output(json=json, quiet=quiet), read_environment()
    out.wordwrap = not nowordwrap
    options = SamplingOptions(temperature, top_k, top_p, min_p, seed=seed)
    config = engine_config(
        settings,
        memory,
        ctx,
        policy,
        threads,
        trace=not no_trace,
        device=device,
        device_memory=device_memory,
        miss=miss,
        reproducible=reproducible,
        prefix_cache=not no_prefix_cache,
        skip_below=skip_below,
        cache_aware=route or 0.0,
        experts=experts,
        speculation=not no_speculation,
        kv=kv,
        draft=draft,
        mtp=not no_mtp,
        pipeline=experimental_pipeline,
    )
    if dry_run:
        if experimental_pipeline is not None:
            raise Usage("--dry-run and --experimental-pipeline cannot be combined")
        print_plan(model, config, settings, out)
        return 0
    prompt = " ".join(words) if words else None
    piped = _piped_text()
    if piped is not None and not raw:
        piped = piped.strip() or None
    text = "\n\n".join(part for part in (piped, prompt) if part)
    text = text.encode(errors="surrogateescape").decode(errors="replace")  # bytes of an argument
    interactive = prompt is None and piped is None
    if interactive and raw:
        raise Usage("--raw needs a prompt: a conversation uses the model's template")
    if interactive and (json or sys.stdin is None or not sys.stdin.isatty()):
        raise Usage("there is no prompt: give one as an argument or on standard input")
    if not interactive and not text:
        raise Usage("the prompt is empty")
    form = None if format is None else parse_form(format)
    limits = Limits(max_tokens, tuple(stop or ()))
    ways = _Ways(options, limits, raw, verbose, shows_thinking=not hidethinking)
    begun = (system, think, form)
    own = {
        "--memory": memory, "--ctx": ctx, "--threads": threads, "--now": now,
        "--device": None if device == "auto" else device, "--device-memory": device_memory,
        "--miss": None if miss == "auto" else miss,
        "--src": src, "--tgt": tgt,
        "--policy": None if policy == DEFAULT_POLICY else policy,
        "--no-trace": no_trace or None, "--reproducible": reproducible or None,
        "--no-prefix-cache": no_prefix_cache or None,
        "--no-speculation": no_speculation or None,
        "--skip-below": skip_below or None, "--route": route or None,
        "--experts": experts, "--kv": kv, "--draft": draft, "--no-mtp": no_mtp or None,
        "--experimental-pipeline": experimental_pipeline,
        "--no-server": True if server is False else None,
    }  # fmt: skip
    asked = [name for name, value in own.items() if value is not None]
    for name, given in (("--server", bool(server)), ("--keepalive", keepalive is not None)):
        if given and asked:
            raise Usage(f"{asked[0]} and {name} cannot be combined: it needs an engine of its own")
    service = Service(settings, read_server_environment(), bool(server), out)
    if asked:
        found = Found(reason=f"{asked[0]} needs an engine of its own", silent=True)
    else:
        found = look(service.client, model)
    started = False
    if found.about is None:
        if server and found.reason:
            refused = ServerError(found.reason)
            refused.hint = "the same without --server"
            raise refused
        manifest, folder = ensure(model, settings, out)
        named = str(manifest.model)
        if not asked and found.silent and service.may_start and not manifest.encoder_layers:
            problem = service.start(note=not interactive)  # the summary names it
            started = not problem
            found = look(service.client, named) if started else Found(reason=problem)
        elif not found.reason:  # the server may be on this machine, and have the model now
            found = look(service.client, named)
    if found.about is not None:
        if not (interactive or started):
            out.note(f"using the server at {service.client}")
        with stoppable():
            remote = RemotePartner(service.ready, found.about, settings, keepalive)
            if interactive:
                remote.preload()
            return _converse(remote, begun, None if interactive else text, ways, settings, out)
    if verbose or not found.silent:
        reason = found.reason or f"the server at {service.client} does not serve {model}"
        out.note(f"{reason}: the model runs in this process")

    with stoppable():
        with out.spinner(f"loading {manifest.model}"):
            with uncollected():
                from moeinf.cli.chat.local import LocalPartner, Opener  # imports torch
                from moeinf.runtime.generation.seq2seq import Languages

            opener = Opener(config, settings, now, Languages(src, tgt))
            partner = LocalPartner(opener.open(manifest, folder), opener)
        with partner:
            code = _converse(partner, begun, None if interactive else text, ways, settings, out)
            answer = partner.last
            alone = partner.engine.gpu is None  # `plan` reads these figures as the CPU's
            if config.trace and alone and not interactive and answer is not None:
                about = (settings, manifest.model, partner.engine.info.slots)
                remember_speed(*about, answer.decode_steps, answer.decode_seconds)
                remember_prefill(*about, answer.prefilled_tokens, answer.prefill_seconds)
            return code


@dataclass(frozen=True)
class _Ways:
    """The options of the request, and what is shown."""

    options: SamplingOptions
    limits: Limits
    raw: bool
    verbose: bool
    shows_thinking: bool


def _converse(
    partner: Partner,
    begun: tuple[str, bool | None, Form],  # system, think, form
    text: str | None,
    ways: _Ways,
    settings: Settings,
    out: Output,
) -> int:
    """Answer `text`, or hold a conversation without one; return the exit code."""
    partner.system, partner.think, partner.form = begun
    if partner.think and not (ways.raw or thinks(partner.template())):
        raise Usage(f"--think: {partner.model} does not support thinking")
    notes = partner.notes()  # from loading
    for note in (*(partner.choices if ways.verbose else ()), *notes):
        out.note(note)
    if text is None:
        from moeinf.cli.chat.repl import Repl

        out.note(partner.summary)
        if partner.model.name == DEMO:
            out.note(f"Try: {'   '.join(DEMO_EXAMPLES)}")
        shown = ways.shows_thinking
        Repl(partner, ways.options, ways.limits, settings, out, ways.verbose, shown).loop()
        return 0
    said = {"answer": "", "thinking": ""}
    try:
        with interruptible() as stopped:
            answer = partner.say(text, ways.options, ways.limits, stopped, ways.raw)
            for kind, piece in awaited(answer, partner, out, ways.shows_thinking):
                said[kind] += piece
                if kind == "answer" and not out.json:
                    out.text(piece)
                elif kind == "thinking" and ways.shows_thinking and not (out.json or out.quiet):
                    out.thinking(piece)
    except Exception:
        out.end_answer()  # the error begins a line
        raise
    later = partner.notes()
    if partner.form is not None or ways.limits.max_tokens is None:  # else the user wants it short
        later += cut_off(partner, "--max-tokens")
    if out.json:
        thought = {"thinking": said["thinking"]} if said["thinking"] else {}
        about = {**thought, **partner.document(), "notes": notes + later}
        out.document({"text": said["answer"], **about})
    else:
        out.text("\n")
    if ways.verbose:
        out.fields(partner.verbose(), to_stderr=True)
    for note in later:
        out.note(note)
    return _INTERRUPTED if partner.finish_reason == "interrupted" else 0


def _piped_text() -> str | None:
    """Read piped or redirected standard input; None if it is empty or anything else."""
    try:
        mode = os.fstat(sys.stdin.fileno()).st_mode
    except (OSError, ValueError, AttributeError):
        return None
    if not (stat.S_ISFIFO(mode) or stat.S_ISREG(mode) or stat.S_ISSOCK(mode)):
        return None
    return sys.stdin.buffer.read().decode("utf-8", errors="replace") or None
