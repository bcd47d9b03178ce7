"""Draw docs/session.svg: a recorded session at a terminal.

Run: python scripts/picture_session.py
Each command runs in a pseudo-terminal with a home of its own; the terminal's content is drawn.
"""

from __future__ import annotations

import io
import os
import re
import shlex
import sys
import tempfile
from pathlib import Path

import pexpect
from rich.console import Console
from rich.text import Text

PICTURE = Path(__file__).parents[1] / "docs" / "session.svg"
MOEINF = [sys.executable, "-c", "from moeinf.cli.entry import main; main()"]
SESSION = (
    'moeinf run demo "17+25="',
    'moeinf run demo --memory 30% --verbose "sort owl, fig, zebra, ant"',
    "moeinf trace demo --dataset demo --memory 30% --limit 120",
    "moeinf list",
)
COLUMNS = 100
CONTROL = re.compile(r"\x1b\[\?[0-9;]*[a-z]|\x1b\[[0-9;]*[A-HJKSTfr]")


def shown(command: str, home: Path) -> str:
    """Run a command and return the terminal's content at its end; a bar in its last state."""
    environment = {k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "COLUMNS")}
    text, code = pexpect.run(
        shlex.join([*MOEINF, *shlex.split(command)[1:]]),
        env={
            **environment,
            "MOEINF_HOME": str(home),
            "MOEINF_NO_SERVER": "1",
            "TERM": "xterm-256color",
        },
        dimensions=(40, COLUMNS),
        timeout=600,
        withexitstatus=True,
        encoding="utf-8",
    )
    if code:
        raise SystemExit(f"{command}: exit code {code}\n{text}")
    lines = CONTROL.sub("", text.replace("\r\n", "\n")).split("\n")
    return "\n".join(line.rpartition("\r")[2] for line in lines).rstrip()


def draw() -> None:
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True)
    with tempfile.TemporaryDirectory(prefix="moeinf-picture-") as home:
        for command in SESSION:
            console.print(Text("$ ", "bold green") + Text(command, "bold"))
            console.print(Text.from_ansi(shown(command, Path(home))))
            console.print()
    PICTURE.write_text(console.export_svg(title="moeinf"), encoding="utf-8")


if __name__ == "__main__":
    draw()
