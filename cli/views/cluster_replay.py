"""Parse the options of `moeinf simulate --replicas`, and show what several replicas come to.

The input of the table and of the picture is the document that --json prints.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from moeinf.cli.errors import Usage
from moeinf.cli.output import Output
from moeinf.cli.views.columns import Column, legend, number, percent, print_table
from moeinf.offload.replicas.names import ROUTERS, RouterName

if TYPE_CHECKING:
    from moeinf.offload.routing.requests_file import RecordedRequests
    from moeinf.offload.simulator.clock import TimeModel
    from moeinf.offload.simulator.cluster import Sums
    from moeinf.offload.simulator.workload import Habits

_MOST_REPLICAS = 1024
_CONVERSATIONS = 15  # per replica
_LEAST_CONVERSATIONS = 60
_USERS = 10  # per replica

Replicas = Annotated[
    str | None,
    typer.Option(
        metavar="1,2,4", help="Replay an .npz file on so many replicas.", show_default=False
    ),
]
Routers = Annotated[
    str | None,
    typer.Option(metavar="A,B", help=f"{', '.join(ROUTERS)}. Default: all.", show_default=False),
]
Load = Annotated[
    float | None,
    typer.Option(help="Offered work ÷ capacity of the replicas. Default: 0.6.", show_default=False),
]
Users = Annotated[
    int | None,
    typer.Option(help=f"Default: {_USERS} per replica.", show_default=False),
]
Conversations = Annotated[
    int | None,
    typer.Option(help=f"Default: {_CONVERSATIONS} per replica.", show_default=False),
]
Zipf = Annotated[
    float | None,
    typer.Option(help="Exponent of the users' activity. Default: 1.", show_default=False),
]
Burst = Annotated[
    float | None,
    typer.Option(help="Rate in bursts ÷ rate between. Default: 4.", show_default=False),
]
_COLUMNS = [
    Column("ROUTER", lambda result: str(result["router"])),
    Column("REPLICAS", number("replicas", 0)),
    Column("POLICY", lambda result: str(result["policy"])),
    Column("CAPACITY", percent("capacity"), "share of all experts that fit in a replica's RAM"),
    Column("HIT", percent("hit_rate", 1), "experts found in memory while decoding"),
    Column("MB/TOKEN", number("bytes_read_per_token", 0, 1e6), "read per token, prompts too"),
    Column("WAIT-P50", number("wait_p50_s", 1), "modelled seconds in a replica's queue"),
    Column("WAIT-P99", number("wait_p99_s", 1)),
    Column("IMBALANCE", number("imbalance", 2), "busiest replica's time ÷ the mean"),
    Column("TOK/S", number("tokens_per_s", 2), "of all replicas"),
]


@dataclass(frozen=True)
class ClusterOptions:
    """The options as typed; None for one that was not given."""

    replicas: str | None
    router: str | None
    load: float | None
    users: int | None
    conversations: int | None
    zipf: float | None
    burst: float | None

    @property
    def given(self) -> bool:
        """True if several replicas are requested. Raises Usage for an option without --replicas."""
        if self.replicas is None:
            for option in fields(self):
                if getattr(self, option.name) is not None:
                    raise Usage(f"--{option.name} needs --replicas, for example 1,2,4")
        return self.replicas is not None

    def counts(self) -> list[int]:
        """Return the numbers of replicas. Raises Usage."""
        found = []
        for part in (self.replicas or "").split(","):
            count = int(part) if part.strip().isdecimal() else 0
            if not 1 <= count <= _MOST_REPLICAS:
                raise Usage(f"--replicas: {part!r} is invalid (expected 1 to {_MOST_REPLICAS})")
            found.append(count)
        return found

    def routers(self) -> list[RouterName]:
        """Return the routers. Raises Usage."""
        found: list[RouterName] = []
        for part in (self.router or ",".join(ROUTERS)).split(","):
            match = [name for name in ROUTERS if name == part.strip()]
            if not match:
                raise Usage(f"--router: {part!r} is invalid (expected {', '.join(ROUTERS)})")
            found += match
        return found

    def habits(self, replicas: int, seed: int) -> Habits:
        """Return how the users of so many replicas ask. Raises BadWorkload."""
        from moeinf.offload.simulator.workload import Habits

        chosen = {name: getattr(self, name) for name in ("load", "zipf", "burst")}
        return Habits(
            conversations=self.conversations
            if self.conversations is not None
            else max(_LEAST_CONVERSATIONS, _CONVERSATIONS * replicas),
            users=_USERS * replicas if self.users is None else self.users,
            seed=seed,
            **{name: value for name, value in chosen.items() if value is not None},
        )


def cluster_document(
    path: Path,
    asked: ClusterOptions,
    policies: list[str],
    shares: list[float],
    time: TimeModel,
    seed: int,
    out: Output,
) -> dict[str, Any]:
    """Replay a file on every number of replicas behind every router. Raises Usage."""
    from moeinf.offload.replicas.router import Router
    from moeinf.offload.routing.requests_file import read_requests
    from moeinf.offload.simulator.cluster import Machine, run_cluster, service_seconds
    from moeinf.offload.simulator.workload import draw

    if not path.name.endswith(".npz"):
        raise Usage(f"--replicas: {path.name} is invalid (expected an .npz file of requests)")
    if not path.is_file():
        raise Usage(f"{path} is not a file")
    requests, results = read_requests(path), []
    for policy, share, replicas in product(policies, shares, asked.counts()):
        machine, habits = Machine(policy, share, time), asked.habits(replicas, seed)
        service_s = service_seconds(requests, machine, draw(requests, habits, replicas, 1.0))
        conversations = draw(requests, habits, replicas, service_s)
        turns = sum(len(one.turns) for one in conversations)
        for name in asked.routers():
            with out.counting(f"{requests.name}, {replicas} replicas, {name}", turns) as advance:
                router = Router(name, seed)
                sums = run_cluster(
                    requests, conversations, machine, router, replicas, service_s / 2, advance
                )
            results.append(_result(name, machine.policy, share, turns, service_s, sums))
    return {**_about(requests), "results": results}


def _about(requests: RecordedRequests) -> dict[str, Any]:
    return {
        "name": requests.name,
        "layers": requests.layers,
        "experts": requests.experts,
        "top_k": requests.top_k,
        "recorded_requests": len(requests.requests),
    }


def _result(
    router: str, policy: str, share: float, turns: int, service_s: float, sums: Sums
) -> dict[str, Any]:
    return {
        "router": router,
        "replicas": sums.replicas,
        "policy": policy,
        "capacity": share,
        "requests": turns,
        "service_s": round(service_s, 3),
        "hit_rate": round(sums.hit_rate, 5),
        "bytes_read_per_token": round(sums.bytes_read_per_token),
        "wait_p50_s": round(sums.wait_s(0.5), 3),
        "wait_p99_s": round(sums.wait_s(0.99), 3),
        "imbalance": round(sums.imbalance, 4),
        "tokens_per_s": round(sums.tokens_per_s, 4),
        "recomputed_tokens": sums.recomputed,
        "decisions": sums.decisions,
    }


def cluster_table(out: Output, document: dict[str, Any]) -> None:
    """Print a line per router and number of replicas, and what the columns mean."""
    out.prose(
        f"{document['name']}: {document['layers']} layers x {document['experts']} experts, "
        f"{document['top_k']} per token; {document['recorded_requests']} recorded requests"
    )
    print_table(out, _COLUMNS, document["results"], keys=4)
    out.line()
    out.fields(legend(_COLUMNS))


def cluster_picture(documents: list[dict[str, Any]], path: Path) -> None:
    """Write plots over the number of replicas: a line per router, a row per trace and capacity.

    Raises Usage without matplotlib.
    """
    try:
        import matplotlib
    except ImportError as error:
        raise Usage("--plot needs matplotlib: pip install 'moeinf[bench]'") from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows: dict[str, list[dict[str, Any]]] = {}
    for document in documents:
        for result in document["results"]:
            title = f"{document['name']}, {result['policy']} at {result['capacity']:.0%}"
            rows.setdefault(title, []).append(result)
    shown = (
        ("hit_rate", 100.0, "hit rate, %"),
        ("bytes_read_per_token", 1e-6, "MB read per token"),
        ("wait_p99_s", 1.0, "p99 of waiting, s (model)"),
    )
    figure, axes = pyplot.subplots(
        len(rows), 3, figsize=(11, 3 * len(rows) + 0.4), squeeze=False, layout="constrained"
    )
    for line, (title, results) in zip(axes, rows.items(), strict=True):
        for axis, (field, scale, words) in zip(line, shown, strict=True):
            for router in dict.fromkeys(result["router"] for result in results):
                mine = [result for result in results if result["router"] == router]
                counts = [result["replicas"] for result in mine]
                heights = [scale * result[field] for result in mine]
                axis.plot(counts, heights, marker="o", ms=3, label=router)
            axis.set(xscale="log", xlabel="replicas", ylabel=words)
            axis.set_xticks(sorted({r["replicas"] for r in results}), minor=False)
            axis.xaxis.set_major_formatter(matplotlib.ticker.ScalarFormatter())
            axis.minorticks_off()
            axis.grid(alpha=0.3)
        line[0].set_title(title, loc="left")
    figure.legend(*axes[0][0].get_legend_handles_labels(), loc="outside upper center", ncols=4)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
