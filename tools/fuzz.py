"""Fuzz every reader of untrusted bytes with mutated inputs, guided by line coverage.

Run: python -m tools fuzz [--minutes 30] [--target safetensors] [--seed 0] [--findings folder]
An input that reaches a new line of moeinf is kept (in tests/faults/corpus, up to a few KB each) and
mutated further. Inputs run in a child process, which restarts when an input kills or hangs it. Such
an input is a finding, and so is an error that a target does not declare. One input in ten repeats
marks of its format, at two lengths: a time that grows faster than the length is a finding, too.
Prints a table; exits with 1 when there are findings. Pytest replays the corpus.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import resource
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

from tests.faults.growing import Grown, check_growth, repeating
from tests.faults.targets import TARGETS, Target

CORPUS = Path(__file__).parents[1] / "tests" / "faults" / "corpus"
MOST_BYTES = 1 << 16  # of an input
KEPT_BYTES = 2048  # of an input that goes into the repository
GROWTH_SHARE = 0.1  # of the inputs repeat a mark of their format, at two lengths
KEPT_EACH = 24  # of a target
SECONDS_EACH = 15  # an input that takes longer is a finding
MEMORY_BYTES = 6 << 30  # address space beyond what is mapped at the start
_OURS = ("/models/", "/offload/", "/runtime/", "/server/")
_TEXTS = (
    b"-1", b"0", b"1", b"255", b"65536", b"4294967295", b"9223372036854775808", b"1e999", b"NaN",
    b"null", b"true", b"[]", b"{}", b'""', b"\x00", b"\xff\xff\xff\xff", b"\xff" * 8, b"../../x",
    b"\\ud800", b"\\u0000", b"[" * 3000, b"9" * 5000, b"\xed\xa0\x80", b"1.5", b"-0", b"\n",
)  # fmt: skip
_VALUES: tuple[Any, ...] = (
    -1, 0, 1, 2, 3, 7, 255, 1 << 16, (1 << 31) - 1, 1 << 32, 1 << 47, 1 << 62, 1 << 64, -(1 << 63),
    0.5, -0.5, 1e308, float("inf"), float("nan"), None, True, False, "", "x", "../../x", "/x", "\0",
    "\ud800", "x" * 300, [], {}, [[]], [1], [-1], {"x": 1}, [None], ["x"],
)  # fmt: skip


class Slow(BaseException):
    """An input takes too long. It is not an Exception, so that no handler stops it."""


def mutate(data: bytes, others: list[bytes], rng: random.Random) -> bytes:
    """Return a variant of `data`: bytes changed, or a value of its JSON."""
    for _ in range(rng.choice((1, 1, 1, 2, 3, 6))):
        data = _in_json(data, rng) if rng.random() < 0.4 else _in_bytes(data, others, rng)
    return data[:MOST_BYTES]


def _in_bytes(data: bytes, others: list[bytes], rng: random.Random) -> bytes:
    raw, at = bytearray(data), rng.randrange(len(data) + 1)
    length = min(rng.choice((1, 1, 2, 4, 8, 64, 512)), len(raw) - at)
    what = rng.randrange(8)
    if what == 0 and at < len(raw):
        raw[at] ^= 1 << rng.randrange(8)
    elif what == 1 and at < len(raw):
        raw[at] = rng.randrange(256)
    elif what == 2:
        del raw[at : at + length]
    elif what == 3:
        raw[at:at] = raw[at : at + length] * rng.choice((1, 2, 50))
    elif what == 4:
        raw[at : at + rng.choice((0, length))] = rng.choice(_TEXTS)
    elif what == 5:
        other = rng.choice(others)
        start = rng.randrange(len(other) + 1)
        raw[at:] = other[start:]
    elif what == 6:
        del raw[at:]
    else:
        raw[at : at + 4] = rng.randrange(1 << 32).to_bytes(4, "little")
    return bytes(raw)


def _in_json(data: bytes, rng: random.Random) -> bytes:
    """Replace, remove, double or move one value of the JSON in `data`."""
    try:
        document = json.loads(data)
    except (ValueError, RecursionError):
        return data
    places: list[tuple[Any, Any]] = []

    def walk(value: Any, depth: int = 0) -> None:
        pairs = value.items() if isinstance(value, dict) else enumerate(value)
        for key, inner in pairs:
            places.append((value, key))
            if isinstance(inner, dict | list) and depth < 50:
                walk(inner, depth + 1)

    if isinstance(document, dict | list):
        walk(document)
    if not places:
        return json.dumps(rng.choice(_VALUES)).encode()
    holder, key = rng.choice(places)
    what = rng.randrange(6)
    if what == 0:
        del holder[key]
    elif what == 1 and isinstance(holder, dict):
        holder[str(rng.choice(_VALUES))] = holder[key]
    elif what == 2:
        other, place = rng.choice(places)
        with suppress(LookupError, RecursionError, ValueError):
            holder[key] = json.loads(json.dumps(other[place]))
    elif what == 3 and isinstance(holder[key], int | float):
        holder[key] = holder[key] * rng.choice((-1, 2, 1 << 20)) + rng.choice((-1, 0, 1))
    else:
        holder[key] = rng.choice(_VALUES)
    try:
        return json.dumps(document).encode()
    except (ValueError, RecursionError):
        return data


class Coverage:
    """The lines of moeinf that have run, by settrace: 20 times slower, but it guides the fuzzer."""

    def __init__(self) -> None:
        self.seen: set[tuple[int, int]] = set()
        self.fresh = False

    def trace(self, frame: FrameType, event: str, _argument: object) -> Any:
        if not any(part in frame.f_code.co_filename for part in _OURS):
            return None
        code = id(frame.f_code)

        def line(inner: FrameType, _event: str, _argument: object) -> Any:
            key = (code, inner.f_lineno)
            if key not in self.seen:
                self.seen.add(key)
                self.fresh = True
            return line

        return line(frame, event, None)


def run_one(
    target: Target,
    data: bytes,
    folder: Path,
    coverage: Coverage | None = None,
    seconds: int = SECONDS_EACH,
) -> str:
    """Return "read", "refused" or the problem. seconds: 0 is no limit."""

    def late(_signal: int, _frame: object) -> None:
        raise Slow

    signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    if coverage is not None:
        sys.settrace(coverage.trace)
    try:
        target.check(data, folder)
    except target.refuses as error:
        return "refused" if len(str(error)) < 20_000 else "its words are endless"
    except Slow:
        return f"takes more than {seconds} s"
    except BaseException as error:
        sys.settrace(None)
        where = traceback.extract_tb(error.__traceback__)
        ours = [f for f in where if any(part in f.filename for part in _OURS)] or list(where)
        place = f"{Path(ours[-1].filename).name}:{ours[-1].lineno}"
        return f"{type(error).__name__} at {place}: {str(error)[:80]!r}"
    finally:
        sys.settrace(None)
        signal.alarm(0)
    return "read"


def growth_of(target: Target, grown: Callable[[int], bytes], folder: Path) -> str:
    """Return "read", "refused" or the problem; an input of four times the length is timed too."""
    came = run_one(target, grown(MOST_BYTES), folder)

    def make(size: int) -> Callable[[], object]:
        data = grown(size)
        return lambda: run_one(target, data, folder)

    if came in ("read", "refused"):
        try:
            check_growth(make, MOST_BYTES)
        except Grown as error:
            return f"grows too fast: {error}"
    return came


def child(options: argparse.Namespace, seed: int, until: float, place: Path, out: int) -> None:
    """Fuzz until the time `until`; write the outcomes to `out` as JSON lines."""
    warnings.simplefilter("ignore")
    rng = random.Random(seed)
    names = options.target or list(TARGETS)
    corpus: dict[str, list[bytes]] = {}
    coverage = Coverage()
    for name in names:
        kept = sorted((CORPUS / name).glob("*")) if (CORPUS / name).is_dir() else []
        corpus[name] = [*TARGETS[name].seeds(), *(path.read_bytes() for path in kept)]
        for data in corpus[name]:
            (place / "now").write_bytes(name.encode() + b"\n" + data)
            run_one(TARGETS[name], data, _fresh(place), coverage, seconds=0)  # imports take long
    used = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY_BYTES,) * 2)
    with os.fdopen(out, "w", buffering=1) as report:
        counts: Counter[str] = Counter()
        while time.monotonic() < until:
            name = rng.choice(names)
            pool = corpus[name]
            if rng.random() < GROWTH_SHARE:
                grown = repeating(rng.choice(pool)[:KEPT_BYTES], rng)
                (place / "now").write_bytes(name.encode() + b"\n" + grown(MOST_BYTES))
                came = growth_of(TARGETS[name], grown, _fresh(place))
                counts[f"{name} {came if came in ('read', 'refused') else 'finding'}"] += 1
                if came not in ("read", "refused"):
                    report.write(json.dumps({"finding": came, "target": name}) + "\n")
                    _keep(options.findings / name, grown(MOST_BYTES))
                continue
            source = rng.choice(pool[-8:]) if rng.random() < 0.3 else rng.choice(pool)
            data = mutate(source, pool, rng)
            (place / "now").write_bytes(name.encode() + b"\n" + data)
            coverage.fresh = False
            came = run_one(TARGETS[name], data, _fresh(place), coverage)
            counts[f"{name} {came if came in ('read', 'refused') else 'finding'}"] += 1
            if came not in ("read", "refused"):
                report.write(json.dumps({"finding": came, "target": name}) + "\n")
                _keep(options.findings / name, data)
            elif coverage.fresh:
                pool.append(data)
                if len(data) <= KEPT_BYTES:
                    _keep(CORPUS / name, data, KEPT_EACH)
            if sum(counts.values()) % 200 == 0:
                report.write(json.dumps({"counts": counts, "lines": len(coverage.seen)}) + "\n")
                counts.clear()
        report.write(json.dumps({"counts": counts, "lines": len(coverage.seen)}) + "\n")
    os._exit(0)


def _fresh(place: Path) -> Path:
    """Return the folder for files; it is removed and made again only when it has many files."""
    folder = place / "files"
    if folder.is_dir() and sum(1 for _ in folder.iterdir()) > 12:
        import shutil

        shutil.rmtree(folder)
    folder.mkdir(exist_ok=True)
    return folder.resolve()


def _keep(folder: Path, data: bytes, most: int = 1000) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    if sum(1 for _ in folder.iterdir()) < most:
        (folder / hashlib.sha256(data).hexdigest()[:16]).write_bytes(data)


def fuzz(options: argparse.Namespace) -> tuple[Counter[str], Counter[str], int]:
    """Return (outcomes of the inputs, findings, lines reached)."""
    counts: Counter[str] = Counter()
    findings: Counter[str] = Counter()
    lines, until, seed = 0, time.monotonic() + 60 * options.minutes, options.seed
    options.findings.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="moeinf-fuzz-") as name:
        place = Path(name)
        (place / "now").write_bytes(b"")
        while time.monotonic() < until:
            reading, writing = os.pipe()
            pid = os.fork()
            if pid == 0:
                os.close(reading)
                with (options.findings / "stderr.txt").open("a") as log:
                    os.dup2(log.fileno(), 2)
                try:
                    child(options, seed, until, place, writing)
                finally:
                    traceback.print_exc()
                    os._exit(70)
            os.close(writing)
            with os.fdopen(reading) as report:
                for line in report:
                    said = json.loads(line)
                    if "finding" in said:
                        findings[f"{said['target']}: {said['finding']}"] += 1
                    else:
                        counts.update(said["counts"])
                        lines = max(lines, said["lines"])
            status = os.waitpid(pid, 0)[1]
            seed += 1
            if status != 0:
                target, _, data = (place / "now").read_bytes().partition(b"\n")
                findings[f"{target.decode()}: the process ended with {status}"] += 1
                _keep(options.findings / target.decode(), data)
    return counts, findings, lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--target", action="append", choices=sorted(TARGETS))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--findings", type=Path, default=Path("fuzz-findings"))
    options = parser.parse_args()
    counts, findings, lines = fuzz(options)
    print(f"{'target':18}{'inputs':>10}{'read':>10}{'refused':>10}{'findings':>10}")
    for name in options.target or TARGETS:
        of = [counts[f"{name} {what}"] for what in ("read", "refused", "finding")]
        print(f"{name:18}{sum(of):10,}{of[0]:10,}{of[1]:10,}{of[2]:10,}")
    print(
        f"{sum(counts.values()):,} inputs in {options.minutes:g} minutes, {lines:,} lines reached"
    )
    for text, count in findings.most_common():
        print(f"FINDING ×{count}: {text}")
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
