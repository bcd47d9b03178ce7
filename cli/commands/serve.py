"""Define `moeinf serve`: serve Ollama's and OpenAI's APIs on this machine."""

from __future__ import annotations

import math
import signal
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import urlsplit

import typer

from moeinf.cli.errors import Usage
from moeinf.cli.imports import uncollected
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
    PipelineStages,
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
from moeinf.offload.replicas.names import DEFAULT_ROUTER, ROUTERS
from moeinf.runtime.config import (
    EngineConfig,
    ServerSettings,
    read_environment,
    read_server_environment,
)
from moeinf.runtime.library.library import Library
from moeinf.runtime.library.processes import Registry
from moeinf.runtime.machine.device_choice import check_usable, choose_processor
from moeinf.runtime.machine.network_home import check_replica_home

if TYPE_CHECKING:
    from moeinf.server.cluster.launch import ClusterSettings

MOST_REPLICAS = 1024
_CLIENT = "ray://"  # Ray's client: it deploys, and cannot stream
_CHECK_SECONDS = 5.0
_ENDS = (signal.SIGINT, signal.SIGTERM)
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
  MOEINF_STAGE_KEY      the key that stages of a pipeline share
  MOEINF_PREFIX_MEMORY  RAM for the KV of ended requests (what is free); 0: none
  MOEINF_PREFIX_DISK    the same on disk, for each model (4GiB); 0: none
  MOEINF_HOME           the folder of models and logs (~/.moeinf)
  MOEINF_DEBUG          1: print a traceback with an error
  MOEINF_LIBCUDA        the path of libcuda, if the system does not find it
  MOEINF_GRAPHS         1: CUDA graphs with a torch before 2.13, too
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
    experimental_pipeline: PipelineStages = None,
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
            help="For `moeinf run`: end after this time without a model or a request.",
        ),
    ] = None,
    cluster: Annotated[
        str | None,
        typer.Option(
            metavar="local|auto|ray://HOST:PORT",
            help="Serve from replicas in a Ray cluster: a new one on this machine, the one that it "
            "belongs to, or a remote one, whose head node then listens.",
            show_default=False,
        ),
    ] = None,
    replicas: Annotated[
        str | None,
        typer.Option(
            metavar="N|MIN-MAX", help="Replicas of --cluster. Default: 2.", show_default=False
        ),
    ] = None,
    router: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help=f"With --cluster: {', '.join(ROUTERS)}. Default: {DEFAULT_ROUTER}.",
            show_default=False,
        ),
    ] = None,
    retry: Annotated[
        bool,
        typer.Option(
            "--retry", help="With --cluster: continue a stream on another replica if its own ends."
        ),
    ] = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", help="Print a line per request on stderr.")
    ] = False,
    quiet: Quiet = False,
) -> None:
    """Answer over HTTP until Ctrl-C, at MOEINF_HOST (127.0.0.1:11435 by default).

    A model is loaded when a request names it, and unloaded after MOEINF_KEEP_ALIVE (5m) without a
    request. MOEINF_NUM_PARALLEL requests are decoded together. Each engine prints its choices and
    problems on stderr.

    Example: moeinf serve --memory 4GiB
    """
    for option, value in (("replicas", replicas), ("router", router), ("retry", retry)):
        if cluster is None and value:
            raise Usage(f"--{option} needs --cluster, for example --cluster local")
    if cluster is not None and experimental_pipeline is not None:
        raise Usage("--cluster and --experimental-pipeline cannot be combined")
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
        pipeline=experimental_pipeline,
    )

    with uncollected():
        from moeinf.server.serve import run_server  # imports torch and FastAPI

    opened = ExitStack()

    def listening(address: str) -> None:
        try:  # `run` and `stop` find this server by its entry
            opened.callback(Registry(settings.run).register_server(address).close)
        except OSError as error:
            out.note(f"{settings.run} cannot be written ({problem(error)}): `run` needs --server")
        out.note(f"listening on http://{address} (Ctrl-C ends it)")
        _note_no_key(server, out)

    def tell(line: str) -> None:
        with suppress(SystemExit):  # rich raises it when the reader of stderr has left
            out.note(line)

    with opened:
        config = replace(config, parallel=server.parallel)
        unused_s = math.inf if background is None else background
        app = None
        if cluster is not None:
            read = partial(_settings, cluster, replicas, router, retry, config, out)
            if cluster.startswith(_CLIENT):
                _remote(cluster, read, config, server, out)
                return
            app = opened.enter_context(_cluster(cluster, read, config, server, out))
        run_server(settings, server, config, listening, tell, unused_s=unused_s, app=app)


def _note_no_key(server: ServerSettings, out: Output) -> None:
    if server.api_key is None and not server.on_loopback:
        out.note("other machines can use this address without a key: MOEINF_API_KEY sets one")


def _cluster(
    address: str,
    read: Callable[[], ClusterSettings],
    config: EngineConfig,
    server: ServerSettings,
    out: Output,
) -> AbstractContextManager[Any]:
    """Return the context in which replicas run. read: the options. Raises Usage. Imports Ray."""
    if address not in ("local", "auto"):
        raise Usage(
            f"--cluster: {address!r} is invalid (expected local, auto or {_CLIENT}HOST:PORT)"
        )
    if address != "local":
        check_replica_home(read_environment().home)
    settings = read()
    from moeinf.server.cluster.launch import running

    return running(address, config, server, settings, out.note)


def _remote(
    address: str,
    read: Callable[[], ClusterSettings],
    config: EngineConfig,
    server: ServerSettings,
    out: Output,
) -> None:
    """Serve from another machine's cluster until SIGINT or SIGTERM. Raises Usage, NoCluster."""
    host = urlsplit(address).hostname
    if not host:
        raise Usage(f"--cluster: {address!r} is invalid (expected {_CLIENT}HOST:PORT)")
    if not server.port:
        raise Usage(f"--port: 0 is invalid with --cluster {_CLIENT} (expected 1 to 65535)")
    settings = read()
    from moeinf.server.cluster.launch import deployed

    ended = threading.Event()
    before = {number: signal.signal(number, lambda *_: ended.set()) for number in _ENDS}
    try:
        with deployed(address, config, server, settings, out.note) as check:
            where = f"only on {host}" if server.on_loopback else f"in the cluster of {host}"
            out.note(f"listening on http://{server.host}:{server.port} {where} (Ctrl-C ends it)")
            _note_no_key(server, out)
            while not ended.wait(_CHECK_SECONDS):
                check()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _settings(
    address: str,
    replicas: str | None,
    router: str | None,
    retry: bool,
    config: EngineConfig,
    out: Output,
) -> ClusterSettings:
    """Read the options of replicas. Raises Usage. Imports Ray."""
    kind = next((name for name in ROUTERS if name == (router or DEFAULT_ROUTER)), None)
    if kind is None:
        raise Usage(f"--router: {router!r} is invalid (expected {', '.join(ROUTERS)})")
    least, _, most = (replicas or "2").partition("-")
    counts = [int(part) if part.isdecimal() else 0 for part in (least, most or least)]
    if not 1 <= counts[0] <= counts[1] <= MOST_REPLICAS:
        raise Usage(f"--replicas: {replicas!r} is invalid (expected 1 to {MOST_REPLICAS}, or 2-4)")
    try:
        from moeinf.server.cluster.launch import ClusterSettings, bytes_of
    except ModuleNotFoundError as error:
        if error.name != "ray":
            raise
        raise Usage("--cluster needs Ray: pip install 'moeinf[cluster]'") from error
    out.note(f"starting {counts[0]} replicas in Ray ({address})")
    memory = 0 if address == "local" else bytes_of(config.memory)
    return ClusterSettings(kind, counts[0], counts[1], memory_bytes=memory, retry=retry)
