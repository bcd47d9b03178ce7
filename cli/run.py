"""`moeinf run`: one answer, or a conversation."""

from __future__ import annotations

import os
import stat
import sys
from typing import Annotated

import typer

from moeinf.cli.interrupt import interruptible, stoppable
from moeinf.cli.options import (
    Context,
    Device,
    DeviceMemory,
    Json,
    Memory,
    Model,
    NoTrace,
    PolicyName,
    Quiet,
    Threads,
    Usage,
    engine_config,
)
from moeinf.cli.output import Output
from moeinf.cli.plan import print_plan
from moeinf.cli.pull import ensure
from moeinf.offload.policy import DEFAULT_POLICY
from moeinf.runtime.config import read_environment
from moeinf.runtime.sampler import SamplingOptions
from moeinf.runtime.speeds import remember_speed

_INTERRUPTED = 130
Stop = Annotated[
    list[str] | None,
    typer.Option(help="End before this text; may be repeated.", show_default=False),
]


def run(
    model: Model,
    prompt: Annotated[str | None, typer.Argument(show_default=False)] = None,
    memory: Memory = None,
    device: Device = "auto",
    device_memory: DeviceMemory = None,
    policy: PolicyName = DEFAULT_POLICY,
    ctx: Context = None,
    temperature: Annotated[float | None, typer.Option(help="0 is greedy.")] = None,
    top_k: Annotated[int | None, typer.Option(help="Keep the k best tokens; 0: all.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Keep the best of this mass.")] = None,
    min_p: Annotated[
        float | None, typer.Option(help="Keep what has this share of the best.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="The same seed gives the same text.")] = None,
    max_tokens: Annotated[int | None, typer.Option(min=0, help="Tokens at most.")] = None,
    stop: Stop = None,
    system: Annotated[str, typer.Option(help="The system message.", show_default=False)] = "",
    src: Annotated[
        str | None, typer.Option(help="Translate from, as eng_Latn.", show_default=False)
    ] = None,
    tgt: Annotated[
        str | None, typer.Option(help="Translate to, as fra_Latn.", show_default=False)
    ] = None,
    raw: Annotated[bool, typer.Option("--raw", help="The prompt as it is, no template.")] = False,
    think: Annotated[
        bool | None, typer.Option("--think/--nothink", help="Whether to think before answering.")
    ] = None,
    hidethinking: Annotated[
        bool, typer.Option("--hidethinking", help="Show only the answer.")
    ] = False,
    now: Annotated[str | None, typer.Option(hidden=True, help="The date templates see.")] = None,
    threads: Threads = None,
    no_trace: NoTrace = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", help="Timings, hit rate, bytes read.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the plan, load nothing.")
    ] = False,
    json: Json = False,
    quiet: Quiet = False,
) -> int:
    """Runs a model: with PROMPT (or piped text) one answer, else a conversation.

    Example: moeinf run demo --memory 30% --verbose "17+25="
    """
    out, settings = Output(json=json, quiet=quiet), read_environment()
    options = SamplingOptions(temperature, top_k, top_p, min_p, seed=seed)
    config = engine_config(
        settings, memory, ctx, policy, threads, not no_trace, device, device_memory
    )
    if dry_run:
        print_plan(model, config, settings, out)
        return 0
    piped = _piped_text()
    if piped is not None and not raw:
        piped = piped.strip() or None
    text = "\n\n".join(part for part in (piped, prompt) if part)
    text = text.encode(errors="surrogateescape").decode(errors="replace")  # bytes of an argument
    interactive = prompt is None and piped is None
    if interactive and (json or sys.stdin is None or not sys.stdin.isatty()):
        raise Usage("there is no prompt: give one as an argument or on standard input")
    if not interactive and not text:
        raise Usage("the prompt is empty")
    manifest, folder = ensure(model, settings, out)

    from moeinf.cli.repl import Repl  # torch and the tokenizer come in only here
    from moeinf.runtime.engine import Engine
    from moeinf.runtime.generate import Limits
    from moeinf.runtime.report import statistics, verbose_lines
    from moeinf.runtime.sources import Languages, converse

    limits = Limits(max_tokens, tuple(stop or ()))
    with stoppable(), Engine(manifest, folder, config, settings) as engine:
        conversation = converse(engine, system, now, Languages(src, tgt))
        conversation.think = think
        if interactive or verbose:
            for note in engine.choices:
                out.note(note)
        if interactive:
            shown = not hidethinking
            Repl(engine, conversation, options, limits, settings, out, verbose, shown).loop()
            return 0
        with interruptible() as stopped:
            ask = conversation.complete if raw else conversation.ask
            answer = ask(text, options, limits, stopped)
            said = {"answer": "", "thinking": ""}
            for kind, piece in conversation.pieces(answer):
                said[kind] += piece
                if kind == "answer" and not json:
                    out.text(piece)
                elif kind == "thinking" and not (json or hidethinking or quiet):
                    out.thinking(piece)
        if json:
            thought = {"thinking": said["thinking"]} if said["thinking"] else {}
            out.document(
                {
                    "text": said["answer"],
                    **thought,
                    "finish_reason": answer.finish_reason,
                    "prompt_tokens": answer.prompt_tokens,
                    "tokens": len(answer.tokens),
                    "token_ids": answer.tokens,
                    "stats": statistics(engine, answer),
                }
            )
        else:
            out.text("\n")
        if verbose:
            out.fields(verbose_lines(engine, answer, engine.load_seconds), to_stderr=True)
        for note in engine.take_notes():
            out.note(note)
        if config.trace:
            remember_speed(
                settings,
                manifest.model,
                engine.placement.slots,
                answer.decode_steps,
                answer.decode_seconds,
            )
        return _INTERRUPTED if answer.finish_reason == "interrupted" else 0


def _piped_text() -> str | None:
    """What was piped or redirected into us; None when standard input is anything else."""
    try:
        mode = os.fstat(sys.stdin.fileno()).st_mode
    except (OSError, ValueError, AttributeError):
        return None
    if not (stat.S_ISFIFO(mode) or stat.S_ISREG(mode) or stat.S_ISSOCK(mode)):
        return None
    return sys.stdin.buffer.read().decode("utf-8", errors="replace") or None
