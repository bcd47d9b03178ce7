"""Run every row of the fault list and print the faults, the injections and the outcomes.

Run: python scripts/faults.py [--minutes 30] [--soak 60] [--quick] [--only words]
Runs the tests of a row with every injection point (--quick: with a few, like pytest). Runs the
fuzzer for --minutes, and the server's soak for --soak minutes (0: not run). Prints a table; exits
with 1 when anything is wrong. A row that cannot run here has the reason in the table.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
_SAYING_HOW_MANY = ("-o", "addopts=--import-mode=importlib")  # the project's own options are quiet


@dataclass(frozen=True)
class Row:
    """tests: pytest nodes; missing: the reason when the row cannot run."""

    fault: str
    tests: tuple[str, ...] = ()
    missing: str = ""


ROWS = (
    Row(
        "kill -9 of a pull (folder, hub) at every write, fsync, rename, unlink; disk full there",
        (
            "tests/runtime/hub/test_kill_points.py",
            "tests/cli/commands/models/test_pull_hub.py::test_kill_and_rerun",
        ),
    ),
    Row(
        "kill -9 of pull, cp, rm, EAMC, conversation save",
        (
            "tests/faults/test_crash_points.py -k kill",
            "tests/runtime/eamc/test_append_log.py -k kill",
        ),
    ),
    Row("power loss: only what was made durable", ("tests/faults/test_crash_points.py -k power",)),
    Row("power loss: names without data", ("tests/faults/test_crash_points.py -k names",)),
    Row("disk full", ("tests/faults/test_crash_points.py -k no-space",)),
    Row(
        "EIO, short, slow, flipped reads during generation",
        ("tests/faults/test_engine_faults.py -k 'not memory'", "tests/native/test_file_reader.py"),
    ),
    Row(
        "flipped, cut, swapped, replaced, missing shard, before and while loaded",
        (
            "tests/faults/test_shards.py",
            "tests/runtime/engine/test_engine.py -k damaged",
            "tests/cli/commands/models/test_verify.py",
        ),
    ),
    Row(
        "allocation fails at every large request",
        (
            "tests/faults/test_engine_faults.py -k memory",
            "tests/native/test_slot_pool.py -k memory",
            "tests/faults/test_server_faults.py -k engine_that_fails",
        ),
    ),
    Row(
        "page-lock fails (fake driver)",
        (
            "tests/offload/gpu_tier/test_tiered_store.py -k page_locking",
            "tests/native/test_device.py -k locked",
            "tests/runtime/engine/test_gpu_engine.py -k page_locking",
        ),
    ),
    Row(
        "a copy thread hangs or dies; races in the queue",
        (
            "tests/native/test_residents_and_hangs.py",
            "tests/native/test_drivers.py",
            "tests/offload/store/test_expert_store.py -k hung",
        ),
    ),
    Row(
        "memory budget through a conversation, under a cgroup limit",
        ("tests/faults/test_budget.py", "tests/runtime/library/test_memory_bounds.py"),
    ),
    Row(
        "GPU out of memory, failed copies, a device that dies (fake driver)",
        (
            "tests/offload/gpu_tier/test_tiered_store.py -k 'memory or failing'",
            "tests/native/test_device.py -k 'failed or fault or fit'",
            "tests/runtime/engine/test_gpu_engine.py -k failed",
            "tests/cli/test_gpu.py -k fails",
        ),
    ),
    Row(
        "many processes pull, run, cp, rm, trace one model; some killed",
        (
            "tests/faults/test_many_processes.py",
            "tests/cli/commands/models/test_pull_hub.py::test_two_pulls_at_once",
            "tests/runtime/library/test_processes.py",
        ),
    ),
    Row(
        "SIGINT and SIGTERM at every token",
        ("tests/faults/test_signals.py", "tests/cli/chat/test_signals.py"),
    ),
    Row(
        "hostile repositories: names, sizes, headers, configs, tokenizers",
        (
            "tests/faults/test_hostile_repository.py",
            "tests/runtime/checkpoints/test_checkpoint.py",
            "tests/models/test_config.py",
            "tests/runtime/test_names.py",
            "tests/cli/commands/models/test_pull_hub.py -k hostile",
        ),
    ),
    Row("pickles that execute", ("tests/runtime/checkpoints/test_torch_bin.py",)),
    Row("template bombs and escapes", ("tests/runtime/text/test_chat_template.py",)),
    Row("the fuzzer's corpus", ("tests/faults/test_corpus.py",)),
    Row(
        "HTTP: slow headers, bodies, rubbish, Host, Origin, keys, queues, leaving",
        ("tests/server/test_http.py", "tests/faults/test_server_faults.py"),
    ),
    Row(
        "redirects and tokens; a hub that lies, stalls, cuts",
        ("tests/runtime/hub/test_download.py",),
    ),
)


def run_row(row: Row, quick: bool, log: Path) -> tuple[str, str, bool]:
    """Return (number of injections, outcomes, true when no test failed)."""
    outcomes: Counter[str] = Counter()
    passed, failed = 0, []
    for test in row.tests:
        path, _, words = test.partition(" -k ")
        chosen = ["-k", words.strip("'")] if words else []
        log.write_text("")
        chosen += ["-m", "not full"] if quick else []
        run = subprocess.run(
            [sys.executable, "-m", "pytest", path, *chosen, *_SAYING_HOW_MANY, "--timeout=1800"],
            cwd=ROOT, env={**os.environ, "MOEINF_FAULTS_LOG": str(log)},
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        found = re.search(r"(\d+) passed", run.stdout)
        passed += int(found[1]) if found else 0
        if run.returncode != 0:
            failed.append(test)
            print(run.stdout[-3000:], file=sys.stderr)
        for skip in re.findall(r"(\d+) skipped", run.stdout):
            outcomes["tests not run here"] += int(skip)
        for line in log.read_text().splitlines():
            outcomes.update(json.loads(line)["outcomes"])
    count = sum(outcomes.values()) - outcomes["tests not run here"]
    told = [f"{n} {what}" for what, n in sorted(outcomes.items())] + [f"{passed} tests passed"]
    told += [f"FAILED: {test}" for test in failed]
    return f"{count or '-'}", "; ".join(told), not failed


def run_script(*arguments: str) -> tuple[str, bool]:
    """Return the last line of a script, and True on success; its output goes to stderr."""
    run = subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, check=False
    )
    print(run.stdout, file=sys.stderr)
    lines = [line for line in run.stdout.splitlines() if line.strip()]
    return (lines[-1] if lines else run.stderr[-300:]), run.returncode == 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=30, help="of the fuzzer")
    parser.add_argument("--soak", type=float, default=60, help="minutes of the server's soak")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--only", default="", help="rows with these words")
    options = parser.parse_args()
    rows: list[tuple[str, str, str, str]] = []
    well = True
    with tempfile.TemporaryDirectory(prefix="moeinf-faults-") as folder:
        for row in (row for row in ROWS if options.only in row.fault):
            if row.missing:
                rows.append((row.fault, "-", f"not run: {row.missing}", "-"))
                continue
            start = time.monotonic()
            count, outcomes, fine = run_row(row, options.quick, Path(folder) / "log")
            well = well and fine
            rows.append((row.fault, count, outcomes, "nothing" if fine else "see above"))
            print(f"{row.fault}: {time.monotonic() - start:.0f} s", file=sys.stderr)
    long = (
        ("fuzzer", options.minutes, "fuzz"),
        ("soak of the server", options.soak, "soak"),
    )
    for what, minutes, script in long:
        if options.only in what:
            if minutes == 0:
                rows.append((what, "-", "not run: asked for 0 minutes", "-"))
                continue
            told, fine = run_script("-m", "tools", script, "--minutes", str(minutes))
            well = well and fine
            rows.append((f"{what}, {minutes:g} min", "-", told, "nothing" if fine else "see above"))
    print(f"Linux {platform.release()}, Python {platform.python_version()}, {os.cpu_count()} cores")
    print("\n| fault | injections | outcomes | lost |\n|---|---|---|---|")
    for cells in rows:
        print(f"| {' | '.join(cells)} |")
    return 0 if well else 1


if __name__ == "__main__":
    sys.exit(main())
