"""Define `moeinf doctor`: what this installation can do here, and what to type for each lack."""

from __future__ import annotations

import sys
from typing import Any

from moeinf.cli.options import Json, Quiet
from moeinf.cli.output import Output
from moeinf.cli.terminal import columns, is_terminal
from moeinf.runtime.config import read_environment
from moeinf.runtime.machine.diagnosis import Finding, diagnose
from moeinf.runtime.version import surroundings, version

_LEAST_COLUMNS = 60  # tables break into parts below it


def doctor(json: Json = False, quiet: Quiet = False) -> None:
    """Check what this installation can do here, and print what to type for each thing missing.

    It measures and changes nothing. Attach its --json to a bug report.

    Example: moeinf doctor
    """
    out = Output(json=json, quiet=quiet)
    findings = [*diagnose(read_environment()), _locale(), _terminal(out)]
    if json:
        out.document(_document(findings))
        return
    out.line(f"moeinf {version()}")
    rows = [[_words(f), "ok" if f.ok else "missing", f.fact] for f in findings]
    out.table(["CHECK", "", "FOUND"], rows)
    hints = [(_words(finding), finding.hint) for finding in findings if finding.hint]
    if hints:
        out.line()
        out.line("To type:")
        out.fields(hints)


def _words(finding: Finding) -> str:
    return finding.name.replace("_", " ")


def _locale() -> Finding:
    """Look at the encoding of stdout: text of models has any character."""
    encoding = sys.stdout.encoding or "unknown"
    if encoding.lower().replace("-", "") == "utf8":
        return Finding("locale", True, encoding)
    fact = f"{encoding}: other characters are shown as ?"
    return Finding("locale", False, fact, "export LC_ALL=C.UTF-8")


def _terminal(out: Output) -> Finding:
    """Look at the terminal of stdout."""
    if not is_terminal(out.console):
        return Finding("terminal", True, "none: output goes to a file or a pipe")
    width = columns(out.console)
    if not width:
        fact = "a dumb one: no colours, bars or spinner"
        return Finding("terminal", False, fact, "export TERM=xterm-256color")
    fact = f"{width} columns, {out.console.color_system or 'no'} colours"
    return Finding("terminal", width >= _LEAST_COLUMNS, fact)


def _document(findings: list[Finding]) -> dict[str, Any]:
    return {
        "version": version(),
        "surroundings": surroundings(),
        "findings": [
            {"name": f.name, "ok": f.ok, "fact": f.fact, "hint": f.hint or None} for f in findings
        ],
    }
