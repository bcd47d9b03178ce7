"""Define `moeinf stage`: compute some layers of a model for a process on another machine."""

from __future__ import annotations

import socket
from contextlib import closing, suppress
from dataclasses import replace
from typing import Annotated

import typer

from moeinf.cli.chat.signals import stoppable
from moeinf.cli.commands.models.pull import ensure
from moeinf.cli.errors import Usage
from moeinf.cli.options import (
    Context,
    KvForm,
    Memory,
    Model,
    PolicyName,
    Quiet,
    Threads,
    engine_config,
)
from moeinf.cli.output import Output
from moeinf.errors import problem
from moeinf.offload.policy.names import DEFAULT_POLICY
from moeinf.runtime.config import read_environment, read_server_environment
from moeinf.runtime.engine.pipeline.address import parse_address
from moeinf.runtime.invalid import InvalidValue


def stage(
    model: Model,
    layers: Annotated[
        str, typer.Option(metavar="FIRST-LAST", help="Which layers, counted from 0: 8-15.")
    ],
    listen: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="Where the first stage connects to.")
    ],
    experimental: Annotated[
        bool, typer.Option("--experimental", help="Needed: options and messages may change.")
    ] = False,
    memory: Memory = None,
    ctx: Context = None,
    policy: PolicyName = DEFAULT_POLICY,
    kv: KvForm = None,
    threads: Threads = None,
    quiet: Quiet = False,
) -> None:
    """Compute some layers for `moeinf run MODEL --experimental-pipeline HOST:PORT`, until Ctrl-C.

    Environment: MOEINF_STAGE_KEY is a key that all stages share, needed for an address that other
    machines can reach; MOEINF_NUM_PARALLEL the requests that are computed together.

    Example: moeinf stage demo --experimental --layers 2-3 --listen 127.0.0.1:11436
    """
    if not experimental:
        raise Usage("stages are experimental: add --experimental")
    first, last = _layers(layers)
    out, settings = Output(quiet=quiet), read_environment()
    where = parse_address("--listen", listen, settings.stage_key)
    config = engine_config(settings, memory, ctx, policy, threads, trace=False, kv=kv, mtp=False)
    config = replace(config, parallel=read_server_environment().parallel, speculation=False)
    manifest, folder = ensure(model, settings, out)

    def tell(line: str) -> None:
        with suppress(SystemExit):  # rich raises it when the reader of stderr has left
            out.note(line)

    with stoppable():
        from moeinf.runtime.engine.pipeline.stage import Stage  # imports torch

        try:
            kind = socket.AF_INET6 if ":" in where[0] else socket.AF_INET
            door = socket.create_server(where, family=kind)
        except OSError as error:
            words = f"--listen: {listen[:80]!r} cannot be used ({problem(error)})"
            raise InvalidValue(words) from error
        with door:
            with out.spinner(f"loading layers {first}-{last} of {manifest.model}"):
                opened = Stage(manifest, folder, first, last + 1, config, settings)
            with closing(opened):
                host, port, *_ = door.getsockname()
                shown = f"[{host}]" if ":" in host else host
                tell(
                    f"layers {first}-{last} of {manifest.model} at {shown}:{port} (Ctrl-C ends it)"
                )
                opened.serve(door, tell)


def _layers(text: str) -> tuple[int, int]:
    first, _, last = text.partition("-")
    last = last or first
    if not (first.isdecimal() and last.isdecimal() and len(text) < 16 and int(first) <= int(last)):
        raise Usage(f"--layers: {text[:80]!r} is invalid (expected FIRST-LAST, as 8-15)")
    return int(first), int(last)
