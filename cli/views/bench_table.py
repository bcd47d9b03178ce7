"""Show the runs of `moeinf bench`: a table, a sentence that reads it, and a legend.

The input is the list of runs that --json prints.
"""

from __future__ import annotations

from collections.abc import Sequence

from moeinf.cli.output import Output
from moeinf.cli.views.columns import (
    Cell,
    Column,
    Result,
    legend,
    number,
    percent,
    print_table,
    size,
)


def _of_hits(cause: str) -> Cell:
    return lambda run: f"{run['hits'][cause] / max(1, sum(run['hits'].values())):.1%}"


_COLUMNS = [
    Column("POLICY", lambda run: str(run["policy"])),
    Column("TTFT", number("ttft_ms", 0, unit=" ms"), "time to the first token"),
    Column("TPOT", number("tpot_ms_median", 2, unit=" ms"), "time per output token, the median"),
    Column("TOKENS/S", number("tokens_per_s", 1), "1 / TPOT"),
    Column("HIT", percent("hit_rate", 1), "experts found in memory while decoding"),
    Column("READ/TOKEN", size("bytes_read_per_token"), "read from the drive per output token"),
]
_MORE = [
    Column("P95", number("tpot_ms_p95", 2, unit=" ms"), "95% of the output tokens take less"),
    Column("FIRST TTFT", number("first_ttft_ms", 0, unit=" ms"), "TTFT with an empty cache"),
    Column("STALL", percent("stall_share", 1), "share of the time that waits for experts"),
    Column("FLOOR", number("floor_ms", 2, unit=" ms"), "least TPOT that RAM and drive allow"),
    Column("HINTED", _of_hits("hinted"), "share of hits prefetched from a hint of the next layer"),
    Column("PREDICTED", _of_hits("predicted"), "share of hits prefetched from past requests"),
    Column("AHEAD USED", percent("prefetch_accuracy"), "share of prefetched bytes that were used"),
    Column("PER CPU S", number("tokens_per_cpu_s", 1), "tokens per second of processor time"),
    Column("DECIDING", number("policy_us_per_token", 0, unit=" us"), "the policy's time per token"),
    Column("MEMORY", size("memory_bytes"), "RAM for experts"),
    Column("PEAK RSS", size("peak_rss_bytes"), "most RAM of the whole process"),
]


def show(out: Output, runs: Sequence[Result], verbose: bool) -> None:
    """Print one line per run, and the words below it."""
    columns = _COLUMNS + (_MORE if verbose else [])
    print_table(out, columns, runs, keys=1)
    out.explain(reading(runs), legend(columns))


def reading(runs: Sequence[Result]) -> str:
    """Return one sentence: the fastest run against the slowest, or one run against its floor."""
    best = min(runs, key=lambda run: float(run["tpot_ms_median"]))
    worst = max(runs, key=lambda run: float(run["tpot_ms_median"]))
    if best["policy"] != worst["policy"]:
        times = worst["tpot_ms_median"] / best["tpot_ms_median"]
        if f"{times:.2f}" == "1.00":
            return "All policies are equally fast."
        return (
            f"{best['policy']} is the fastest: {times:.2f} times the tokens/s of "
            f"{worst['policy']}{_reads(best, worst)}."
        )
    waits = f"{best['stall_share']:.1%} of the time waits for experts"
    if best["floor_ms"] is None:
        return f"{waits}."
    times = best["tpot_ms_median"] / best["floor_ms"]
    return f"A token takes {times:.1f} times the least that RAM and drive allow; {waits}."


def _reads(best: Result, worst: Result) -> str:
    less, more = best["bytes_read_per_token"], worst["bytes_read_per_token"]
    if not more or less == more:
        return ""
    share = abs(1 - less / more)
    return f", with {share:.0%} {'fewer' if less < more else 'more'} bytes read"
