"""Define `moeinf serve`: serve Ollama's and OpenAI's APIs on this machine."""

from __future__ import annotations

import math
from contextlib import ExitStack, suppress
from dataclasses import replace
from typing import Annotated

import typer

from moeinf.cli.options import (
    Context,
    Device,
    DeviceMemory,
    DraftModel,
    Experts,
    KvForm,
    Memory,
    NoMtp,
    NoPrefixCache,
    NoSpeculation,
    OnMiss,
    PolicyName,
    Quiet,
    Reproducible,
    Route,
    SkipBelow,
    Threads,
    engine_config,
)
from moeinf.cli.output import Output
from moeinf.errors import problem
from moeinf.offload.policy.names import DEFAULT_POLICY
from moeinf.runtime.config import read_environment, read_server_environment
from moeinf.runtime.library.library import Library
from moeinf.runtime.library.processes import Registry
from moeinf.runtime.machine.device_choice import check_usable, choose_processor

# The end of the help text. \b keeps its lines as they are.
EPILOG = """\b
Environment:
  MOEINF_HOST           address: HOST, HOST:PORT or :PORT (127.0.0.1:11435)
  MOEINF_API_KEY        a key that every request must carry
  MOEINF_ORIGINS        web pages that may call, and further names of the
                        server, separated by commas; * allows all
  MOEINF_KEEP_ALIVE     unload a model after this time without a request
                        (5m); negative: never
  MOEINF_NUM_PARALLEL   requests that are answered together (1)
  MOEINF_MAX_QUEUE      requests that may wait for a model (512)
  MOEINF_CONTEXT_SHIFT  1: drop the oldest turns of a chat that does not fit
  MOEINF_MEMORY         the default of --memory
  MOEINF_KV             the default of --kv
  MOEINF_PREFIX_MEMORY  RAM for the KV of ended requests (what is free); 0: none
  MOEINF_PREFIX_DISK    the same on disk, for each model (4GiB); 0: none
  MOEINF_HOME           the folder of models and logs (~/.moeinf)
  MOEINF_DEBUG          1: print a traceback with an error
  MOEINF_LIBCUDA        the path of libcuda, if the system does not find it
  HF_TOKEN, HF_ENDPOINT, HF_HOME, HF_HUB_OFFLINE
                        for pulls, as in huggingface_hub
"""


def serve(
    memory: Memory = None,
    device: Device = "auto",
    device_memory: DeviceMemory = None,
    miss: OnMiss = "auto",
    ctx: Context = None,
    policy: PolicyName = DEFAULT_POLICY,
    skip_below: SkipBelow = 0.0,
    route: Route = None,
    experts: Experts = None,
    kv: KvForm = None,
    threads: Threads = None,
    reproducible: Reproducible = False,
    no_prefix_cache: NoPrefixCache = False,
    no_speculation: NoSpeculation = False,
    draft: DraftModel = None,
    no_mtp: NoMtp = False,
    port: Annotated[
        int | None,
        typer.Option(min=0, max=65535, help="0: any free port.", show_default=False),
    ] = None,
    background: Annotated[
        float | None,
        typer.Option(
            min=0,
            hidden=True,
            metavar="SECONDS",
            help="Run as `moeinf run` starts it: end after this time without a model or a request.",
        ),
    ] = None,
    verbose: Annotated[
        bool, typer.Option("--verbose", help="Print a line per request on stderr.")
    ] = False,
    quiet: Quiet = False,
) -> None:
    """Answer over HTTP until Ctrl-C, at MOEINF_HOST (127.0.0.1:11435 by default).

    Models are loaded when a request names them, and unloaded after MOEINF_KEEP_ALIVE (5m) without
    a request. MOEINF_NUM_PARALLEL requests are answered together. The choices and problems of
    each engine are printed on stderr.

    Example: moeinf serve --memory 4GiB
    """
    out, settings, server = Output(quiet=quiet), read_environment(), read_server_environment()
    server = replace(server, port=server.port if port is None else port, verbose=verbose)
    # Refuse an unusable device now, not at the first request.
    processor = choose_processor(device, device_memory, settings.libcuda)
    if processor.gpu is not None:
        check_usable(processor.gpu.name)
    if draft is not None:
        Library(settings).find(draft)
    config = engine_config(
        settings,
        memory,
        ctx,
        policy,
        threads,
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
    )

    from moeinf.server.serve import run_server  # imports FastAPI and uvicorn

    opened = ExitStack()

    def listening(address: str) -> None:
        try:  # `run` and `stop` find this server by its entry
            opened.callback(Registry(settings.run).register_server(address).close)
        except OSError as error:
            out.note(f"{settings.run} cannot be written ({problem(error)}): `run` needs --server")
        out.note(f"listening on http://{address} (Ctrl-C ends it)")
        if server.api_key is None and not server.on_loopback:
            out.note("other machines can use this address without a key: MOEINF_API_KEY sets one")

    def tell(line: str) -> None:
        with suppress(SystemExit):  # rich raises it when the reader of stderr has left
            out.note(line)

    with opened:
        config = replace(config, parallel=server.parallel)
        unused_s = math.inf if background is None else background
        run_server(settings, server, config, listening, tell, unused_s=unused_s)
