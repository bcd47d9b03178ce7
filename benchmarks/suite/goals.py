"""The goals of our rows, and for a goal that is missed the profile of the time."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.suite.figures import OURS, Row
from benchmarks.suite.models import SuiteModel
from benchmarks.suite.scenarios import Scenario

LLAMA = "llama.cpp"  # the first word of each of its settings
TIMES_AS_FAST = {"ram": 1.2, "limited": 10.0}  # by place: tokens/s ÷ llama.cpp's, at least
OVER_FLOOR = {"ram": 1.25, "limited": 1.3}  # one conversation: a step ÷ its floor, at most
_PROFILE = Path(__file__).parents[2] / "scripts" / "profile_decode.py"
_PROFILE_S = 300.0


@dataclass(frozen=True)
class Interval:
    """A median with the least and the most."""

    median: float
    least: float
    most: float

    def __str__(self) -> str:
        return f"{self.median:.2f} ({self.least:.2f} to {self.most:.2f})"


@dataclass(frozen=True)
class Missed:
    """A goal that a row of ours is short of."""

    scenario: Scenario
    goal: str
    reached: Interval
    row: Row

    def cells(self) -> list[str]:
        """Return the scenario, the goal, the figure, and the shares of the row's time."""
        shares = [self.row[f"{name}_share"] for name in ("ram", "drive", "policy")]
        rest = max(0.0, 1 - sum(shares))
        percent = [f"{share:.0%}" for share in (*shares, rest)]
        return [self.scenario.name, self.goal, str(self.reached), *percent]


MISSED_HEAD = (
    "scenario|goal|reached|reading RAM at its speed|waiting for the drive|deciding|the rest"
).split("|")


def interval(row: Row, name: str) -> Interval:
    return Interval(row[name], row[f"{name}_least"], row[f"{name}_most"])


def times_as_fast(rows: Sequence[Row]) -> Interval | None:
    """Return our tokens/s ÷ those of llama.cpp's fastest setting, in one scenario's rows.

    The rows were measured one after the other: the least is our slowest round against its fastest.
    None without both programs.
    """
    done = [row for row in rows if row["status"] == "ok"]
    ours = next((row for row in done if row["program"] == OURS), None)
    theirs = [row for row in done if row["program"].startswith(LLAMA)]
    if ours is None or not theirs:
        return None
    mine = interval(ours, "tokens_per_s")
    best = interval(max(theirs, key=lambda row: float(row["tokens_per_s"])), "tokens_per_s")
    return Interval(mine.median / best.median, mine.least / best.most, mine.most / best.least)


def missed(scenario: Scenario, rows: Sequence[Row]) -> Iterator[Missed]:
    """Yield the goals that our row of this scenario is short of, by its median."""
    ours = next((row for row in rows if row["program"] == OURS and row["status"] == "ok"), None)
    if ours is None or "over_floor" not in ours:
        return
    least, most = TIMES_AS_FAST[scenario.place], OVER_FLOOR[scenario.place]
    speed, over = times_as_fast(rows), interval(ours, "over_floor")
    if speed is not None and speed.median < least:
        yield Missed(scenario, f"≥ {least:g} × {LLAMA}", speed, ours)
    if scenario.batch == 1 and over.median > most:  # a batch's floor has one's experts
        yield Missed(scenario, f"≤ {most:g} × floor", over, ours)


def profile(model: SuiteModel, threads: int) -> str:
    """Return where a token in RAM spends its time, piece by piece; or why that is unknown."""
    home = str(model.race.settings.home)
    command = [sys.executable, str(_PROFILE), model.name, "--home", home]
    command += ["--threads", str(threads)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_PROFILE_S)
    except subprocess.TimeoutExpired:
        return f"no profile within {_PROFILE_S:.0f} s\n"
    if done.returncode:
        return f"no profile: {done.stderr.strip()[-160:]}\n"
    return done.stdout
