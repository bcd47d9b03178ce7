"""`moeinf simulate`: replays recorded routing against cache policies."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from moeinf.cli.options import Json, Quiet, Usage
from moeinf.cli.output import Output
from moeinf.cli.traces import Hints, hint_source, read_trace
from moeinf.offload.policy_names import POLICY_NAMES

_COLUMNS = "POLICY CAPACITY HIT READS/TOKEN MB/TOKEN INSERTIONS STALL-MS PRECISION RECALL".split()


def simulate(
    traces: Annotated[list[Path], typer.Argument(metavar="TRACE…", show_default=False)],
    policies: Annotated[
        str, typer.Option(metavar="A,B", help="lru, lfu, eamc, adaptive, belady.")
    ] = "lru,lfu,eamc,adaptive,belady",
    capacity: Annotated[
        str, typer.Option(metavar="5%,10%", help="Shares of all experts that fit.")
    ] = "5%,10%,20%,35%",
    sweep: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KNOB=1,2",
            help="eamc_capacity, or a knob of adaptive or eamc: hysteresis, matches, worth, sure, "
            "step, prompt, decays (λ/λ), epsilon. Repeat for several.",
            show_default=False,
        ),
    ] = None,
    eamc_capacity: Annotated[
        int | None,
        typer.Option(
            min=1, help="Requests remembered. Default: by the workload.", show_default=False
        ),
    ] = None,
    hints: Hints = "none",
    late: Annotated[bool, typer.Option(help="Routing reaches the policy one pass late.")] = False,
    interleave: Annotated[int, typer.Option(min=1, help="Requests served in turn.")] = 1,
    shift: Annotated[
        str | None,
        typer.Option(
            metavar="A,B",
            help="First the requests labelled A, then B; A+C joins labels.",
            show_default=False,
        ),
    ] = None,
    ram_over_link: Annotated[float, typer.Option(min=0.01, help="RAM ÷ link bandwidth.")] = 8.0,
    seed: Annotated[int, typer.Option(help="Of modelled hints.")] = 0,
    plot: Annotated[
        Path | None, typer.Option(metavar="OUT.png", help="A picture.", show_default=False)
    ] = None,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Replays .eam recordings and route CSVs: what would each policy have hit, read, waited for?

    Example: moeinf simulate demo.eam --capacity 10%,20%
    """
    out = Output(json=json, quiet=quiet)
    names = [name.strip() for name in policies.split(",")]
    for name in names:
        if name not in (*POLICY_NAMES, "belady"):
            raise Usage(f"{name!r} is not one of {', '.join((*POLICY_NAMES, 'belady'))}")
    shares = [_share(text) for text in capacity.split(",")]
    from moeinf.offload.study import Case, interleaved, run_case, shifted
    from moeinf.offload.timing import TimeModel

    clock = TimeModel(ram_over_link)
    documents = []
    for path in traces:
        recording = read_trace(path)
        if shift is not None:
            recording = shifted(recording, shift)
        if interleave > 1:
            recording = interleaved(recording, interleave)
        results: list[dict[str, Any]] = []
        cases = [
            Case(name, share, eamc_capacity, dict(knobs))
            for knobs in _settings(sweep or [])
            for share in shares
            for name in names
        ]
        with out.counting(f"simulating {recording.name}", len(cases)) as advance:
            for case in cases:
                gate = hint_source(hints, recording, seed)
                outcome = run_case(recording, case, clock, gate, late)
                results.append(
                    {
                        "policy": case.policy,
                        "capacity": case.share,
                        **case.knobs,
                        "hit_rate": round(outcome.hit_rate, 5),
                        "reads_per_token": round(outcome.reads_per_token, 3),
                        "bytes_read_per_token": round(outcome.bytes_read_per_token),
                        "insertions_per_token": round(outcome.insertions_per_token, 3),
                        "stall_ms_per_token": outcome.stall_ms_per_token,
                        "prefetch_precision": outcome.prefetch_precision,
                        "prefetch_recall": outcome.prefetch_recall,
                    }
                )
                advance()
        shape = recording.shape
        documents.append(
            {
                "name": recording.name,
                "layers": shape.layers,
                "experts": shape.experts,
                "top_k": shape.top_k,
                "tokens": recording.decode_tokens,
                "lru_cliff_capacity": shape.layers * shape.top_k / (shape.layers * shape.experts),
                "results": results,
            }
        )
        if not json:
            _table(out, documents[-1])
    model = {
        "ram_over_link": clock.ram_over_link,
        "ram_bytes_per_s": clock.ram_bytes_per_s,
        "hints": hints,
        "late": late,
    }
    if json:
        out.document({"traces": documents, "time_model": model})
    if plot is not None:
        _plot(documents, plot)
        out.note(f"wrote {plot}")


def _share(text: str) -> float:
    try:
        share = float(text.strip().removesuffix("%")) / 100
    except ValueError:
        share = -1
    if not 0 < share <= 1:
        raise Usage(f"{text!r} is not a share of the experts such as 10%")
    return share


def _settings(sweep: list[str]) -> list[dict[str, Any]]:
    """Every combination of the swept knobs."""
    settings: list[dict[str, Any]] = [{}]
    for text in sweep:
        name, separator, values = text.partition("=")
        if not separator:
            raise Usage(f"{text!r} is not KNOB=VALUE,VALUE")
        parsed = [_value(name, value) for value in values.split(",")]
        settings = [{**one, name: value} for one in settings for value in parsed]
    return settings


def _value(name: str, text: str) -> Any:
    try:
        if (name, text) == ("eamc_capacity", "auto"):
            return None
        if name in ("eamc_capacity", "matches"):
            return int(text)
        if name == "decays":
            return tuple(float(part) for part in text.split("/"))
        return float(text)
    except ValueError as error:
        raise Usage(f"{name}={text} is not a number") from error


def _table(out: Output, document: dict[str, Any]) -> None:
    out.line(
        f"{document['name']}: {document['layers']} layers x {document['experts']} experts, "
        f"{document['top_k']} per token; {document['tokens']} decode tokens"
    )
    rows = []
    for result in document["results"]:
        known = {"policy", "capacity"}
        swept = [f"{k}={v}" for k, v in result.items() if k not in known and k not in _MEASURED]
        below = result["policy"] == "lru" and result["capacity"] < document["lru_cliff_capacity"]
        rows.append(
            [
                " ".join([result["policy"], *swept]),
                f"{result['capacity']:.0%}{' (below its cliff)' if below else ''}",
                f"{result['hit_rate']:.1%}",
                f"{result['reads_per_token']:.1f}",
                f"{result['bytes_read_per_token'] / 1e6:.1f}",
                f"{result['insertions_per_token']:.1f}",
                f"{result['stall_ms_per_token']:.2f}",
                _percent(result["prefetch_precision"]),
                _percent(result["prefetch_recall"]),
            ]
        )
    out.table(_COLUMNS, rows)
    out.line()


_MEASURED = frozenset(
    "hit_rate reads_per_token bytes_read_per_token insertions_per_token stall_ms_per_token "
    "prefetch_precision prefetch_recall".split()
)


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"


def _plot(documents: list[dict[str, Any]], path: Path) -> None:
    """Hit rate and stall over capacity, a line per policy, a row per trace."""
    try:
        import matplotlib
    except ImportError as error:
        raise Usage("--plot needs matplotlib: pip install 'moeinf[bench]'") from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    size = (9, 3.2 * len(documents))
    figure, axes = pyplot.subplots(len(documents), 2, figsize=size, squeeze=False)
    for (left, right), document in zip(axes, documents, strict=True):
        lines: dict[str, list[dict[str, Any]]] = {}
        for result in document["results"]:
            swept = [f"{k}={v}" for k, v in result.items() if k not in {*_MEASURED, *_AXES}]
            lines.setdefault(" ".join([result["policy"], *swept]), []).append(result)
        for label, results in lines.items():
            shares = [100 * result["capacity"] for result in results]
            left.plot(shares, [100 * r["hit_rate"] for r in results], "o-", ms=3, label=label)
            right.plot(shares, [r["stall_ms_per_token"] for r in results], "o-", ms=3)
        left.set(title=document["name"], xlabel="experts that fit, %", ylabel="hit rate, %")
        right.set(title="", xlabel="experts that fit, %", ylabel="stall, ms per token")
        left.legend(fontsize=7)
        for axis in (left, right):
            axis.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


_AXES = frozenset(("policy", "capacity"))
