"""Format a race's result as Markdown."""

from __future__ import annotations

from typing import Any

from moeinf.runtime.sizes import format_bytes

Result = dict[str, Any]


def markdown(result: Result) -> str:
    """Return machine, models, and a table per measurement."""
    about, ours, peer = result["machine"], result["ours"], result.get("peer")
    lines = [
        f"### {result['shape']}, {result['layers']} layers, {result['tag']}",
        "",
        f"`{result['command']}`, {result['when']}, {about['cpu']}, {result['threads']} threads, "
        f"moeinf {about['moeinf']}, torch {about['torch']}"
        + (f", {peer['version']} with {peer['type']}" if peer else ""),
        "",
        f"Bits per weight, everything on disk: ours {ours['bits_per_weight']:.2f}"
        + (f", peer {peer['bits_per_weight']:.2f}" if peer else ""),
        "",
    ]
    lines += _pairs(result.get("race", {}))
    lines += _alone(result.get("alone"))
    lines += _cold(result.get("cold"))
    return "\n".join(lines) + "\n"


def _pairs(race: dict[str, Result]) -> list[str]:
    if not race:
        return []
    head = ["what", "peer's setting", "ours ms", "peer ms", "times as fast (least…most)", "÷ floor"]
    rows = []
    for setting, measured in race.items():
        for what in ("decode", "prefill"):
            if what not in measured:
                continue
            one = measured[what]
            ratio, over = one["times_as_fast"], one.get("ours_over_floor")
            rows.append(
                [
                    what,
                    setting,
                    _middle(one["ours_ms"]),
                    _middle(one["peer_ms"]),
                    f"{ratio['median']:.2f} ({ratio['least']:.2f}…{ratio['most']:.2f})",
                    f"{over['median']:.2f} ({over['least']:.2f}…{over['most']:.2f})"
                    if over
                    else "",
                ]
            )
    return [*_table(head, rows), ""]


def _alone(one: Result | None) -> list[str]:
    if one is None:
        return []
    head = ["prefill ms", "decode ms", "floor ms", "÷ floor"]
    over = one["ours_over_floor"]
    row = [
        _middle(one["prefill_ms"]),
        _middle(one["ours_ms"]),
        f"{one['floor_ms']:.2f}",
        f"{over['median']:.2f} ({over['least']:.2f}…{over['most']:.2f})",
    ]
    return [*_table(head, [row]), ""]


def _cold(cold: dict[str, Result] | None) -> list[str]:
    if not cold:
        return []
    head = [
        "cold start",
        "imports s",
        "load s",
        "prefill s",
        "first token s",
        "read once s",
        "ratio",
    ]
    rows = []
    for name, one in cold.items():
        once = one.get("read_once")
        rows.append(
            [name]
            + [f"{one[key]:.2f}" for key in ("imports", "load", "prefill", "first_token")]
            + ([f"{once:.2f}", f"{one['over_read_once']:.2f}"] if once else ["", ""])
        )
    return [*_table(head, rows), ""]


def _middle(values: list[float]) -> str:
    ordered = sorted(values)
    return f"{ordered[len(ordered) // 2]:.2f}"


def _table(head: list[str], rows: list[list[str]]) -> list[str]:
    return [f"| {' | '.join(line)} |" for line in (head, ["---"] * len(head), *rows)]


def capped_markdown(about: Result) -> str:
    """Return the machine, and a table with a row per share and peer."""
    head = "limit|experts|peer|ours tok/s|its|times as fast|first 32|hits|MB/token ours, its|floor"
    lines = [f"`{about['command']}`, {about['machine']['cpu']}", ""]
    lines += [f"| {head.replace('|', ' | ')} |", "|" + "---|" * (head.count("|") + 1)]
    for found in about["shares"]:
        limit = [format_bytes(found["limit_bytes"]), f"{found['share']:.0%}"]
        for name, one in found["races"].items():
            mine, peer, floors = one["ours"], one.get("peer"), one["floor_ms"]
            turns = one.get("turns")
            how = ", limited once loaded" if found["fates"].get(name) else ""
            if one.get("read_ahead_bytes"):
                how += f", read-ahead {format_bytes(one['read_ahead_bytes'])}"
            cells = [
                *limit,
                name + how,
                f"{mine['tokens_per_s']:.2f}",
                f"{peer['tokens_per_s']:.3f}" if peer else "",
                f"{one['times_as_fast']:.1f} ({turns['least']:.1f} to {turns['most']:.1f} in "
                f"{turns['count']} turns)"
                if peer
                else "",
                f"{one['times_as_fast_first_32']:.1f}" if peer else "",
                f"{one['about']['hit_rate']:.1%}",
                f"{mine['disk_bytes_per_token'] / 1e6:.0f}"
                + (f", {peer['disk_bytes_per_token'] / 1e6:.0f}" if peer else ""),
                f"{floors['ram']:.0f} ms RAM, {floors['disk']:.0f} ms disk, "
                f"{floors['at_once']:.0f} ms both at once",
            ]
            lines.append(f"| {' | '.join(cells)} |")
        for name, why in found["fates"].items():
            if why:
                lines.append(f"| {' | '.join([*limit, name, why])} |||||||")
    return "\n".join(lines) + "\n"
