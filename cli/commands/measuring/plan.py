"""Define `moeinf plan`: show whether a model runs here, how fast, and what it needs."""

from __future__ import annotations

from moeinf.cli.options import (
    Context,
    Device,
    DeviceMemory,
    DraftModel,
    Json,
    KvForm,
    Memory,
    NoMtp,
    NoPrefixCache,
    OnMiss,
    PlannedModel,
    PolicyName,
    Quiet,
    Threads,
    engine_config,
)
from moeinf.cli.output import Output
from moeinf.cli.views.plan_text import print_outlook
from moeinf.offload.policy.names import DEFAULT_POLICY
from moeinf.runtime.config import EngineConfig, Settings, read_environment


def plan(
    model: PlannedModel,
    memory: Memory = None,
    device: Device = "auto",
    device_memory: DeviceMemory = None,
    miss: OnMiss = "auto",
    ctx: Context = None,
    policy: PolicyName = DEFAULT_POLICY,
    kv: KvForm = None,
    threads: Threads = None,
    no_prefix_cache: NoPrefixCache = False,
    draft: DraftModel = None,
    no_mtp: NoMtp = False,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Show whether a model runs here, how fast, and what it needs; load and pull nothing.

    MODEL may also be a folder with a checkpoint. For a model that is not pulled yet, only headers
    are read, and every tag is shown. A bound is the highest speed that this machine's memory
    allows. A measured speed is that of the last `moeinf run` with about this memory.

    Example: moeinf plan demo --memory 30%
    """
    out, settings = Output(json=json, quiet=quiet), read_environment()
    config = engine_config(
        settings,
        memory,
        ctx,
        policy,
        threads,
        device=device,
        device_memory=device_memory,
        miss=miss,
        prefix_cache=not no_prefix_cache,
        kv=kv,
        draft=draft,
        mtp=not no_mtp,
    )
    print_plan(model, config, settings, out)


def print_plan(model: str, config: EngineConfig, settings: Settings, out: Output) -> None:
    """Print the plan of `plan` and `run --dry-run`.

    Raises NoSuchModel, DoesNotFit for a --memory below the least, BadContext, DeviceDoesNotFit.
    """
    from moeinf.runtime.jobs.plan_installed import plan_installed  # imports tokenizers

    planned = plan_installed(model, config, settings)
    if planned is None:
        from moeinf.runtime.jobs.plan_model import plan_model  # imports torch

        planned = plan_model(model, config, settings, out.note)
    if out.json:
        out.document(planned.document())
    else:
        print_outlook(planned.found, planned.rungs, planned.rows, planned.sizes, out)
