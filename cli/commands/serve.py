"""Define `moeinf serve`: serve Ollama's and OpenAI's APIs on this machine."""

from __future__ import annotations

from contextlib import ExitStack, suppress
from dataclasses import replace
from typing import Annotated

import typer

from moeinf.cli.options import (
    Context,
    Device,
    DeviceMemory,
    Memory,
    OnMiss,
    PolicyName,
    Quiet,
    Threads,
    engine_config,
)
from moeinf.cli.output import Output
from moeinf.offload.policy.names import DEFAULT_POLICY
from moeinf.runtime.config import read_environment, read_server_environment
from moeinf.runtime.library.processes import Registry
from moeinf.runtime.machine.device_choice import check_usable, choose_processor


def serve(
    memory: Memory = None,
    device: Device = "auto",
    device_memory: DeviceMemory = None,
    miss: OnMiss = "auto",
    ctx: Context = None,
    policy: PolicyName = DEFAULT_POLICY,
    threads: Threads = None,
    port: Annotated[
        int | None,
        typer.Option(min=0, max=65535, help="0: any free port.", show_default=False),
    ] = None,
    quiet: Quiet = False,
) -> None:
    """Answer over HTTP until Ctrl-C, at MOEINF_HOST (127.0.0.1:11435 by default).

    Models are loaded when a request names them, and unloaded after MOEINF_KEEP_ALIVE (5m) without
    a request. MOEINF_NUM_PARALLEL requests are answered together. The choices and problems of
    each engine are printed on stderr.

    Example: moeinf serve --memory 4GiB
    """
    out, settings, server = Output(quiet=quiet), read_environment(), read_server_environment()
    if port is not None:
        server = replace(server, port=port)
    # Refuse an unusable device now, not at the first request.
    processor = choose_processor(device, device_memory, settings.libcuda)
    if processor.gpu is not None:
        check_usable(processor.gpu.name)
    config = engine_config(
        settings,
        memory,
        ctx,
        policy,
        threads,
        device=device,
        device_memory=device_memory,
        miss=miss,
    )

    from moeinf.server.serve import run_server  # imports FastAPI and uvicorn

    opened = ExitStack()

    def listening(address: str) -> None:
        try:  # `run` and `stop` find this server by its entry
            opened.callback(Registry(settings.run).register_server(address).close)
        except OSError as error:
            out.note(f"{settings.run} cannot be written ({error.strerror}): `run` needs --server")
        out.note(f"listening on http://{address} (Ctrl-C ends it)")
        if server.api_key is None and server.host not in ("127.0.0.1", "::1", "localhost"):
            out.note("other machines can use this address without a key: MOEINF_API_KEY sets one")

    def tell(line: str) -> None:
        with suppress(SystemExit):  # rich raises it when the reader of stderr has left
            out.note(line)

    with opened:
        run_server(settings, server, replace(config, parallel=server.parallel), listening, tell)
