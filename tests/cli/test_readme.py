"""Test the README, docs/cli.md and the guides as a new user would.

Their commands run and print what the pages show, and the table has every command and option.
"""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from moeinf.cli.main import command_line
from moeinf.runtime.library.library import DEMO_CHECKPOINT
from tests.cli import warm
from tests.cli.conftest import environment
from tests.hub_server import Hub, serve

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
REFERENCE = (ROOT / "docs/cli.md").read_text(encoding="utf-8")
GUIDES = {"low-memory": 8, "tracing": 8}  # the commands of each
REPOSITORY = "allenai/OLMoE-1B-7B-0924-Instruct"
ANYTHING = "…"
# These differ between runs: figures, their units, lists of figures, the shades of a heat map.
VARIES = (
    (re.compile(r"\d+(?:[.,]\d+)*"), "N"),
    (re.compile(r"\bN ?(?:ns|µs|ms|s|B|KiB|MiB|GiB)\b"), "N"),
    (re.compile(r"(?:N,? )+"), "N "),
    (re.compile(r"[ ░▒▓█]{4,}"), " "),
)


def commands(page: str) -> list[tuple[str, list[str] | None]]:
    """Return every `moeinf` command in order, with the lines that the page shows, if any."""
    found: list[tuple[str, list[str] | None]] = []
    for kind, text in re.findall(r"^```(sh|console)\n(.*?)^```", page, re.DOTALL | re.MULTILINE):
        if kind == "sh":
            lines = (line.partition(" #")[0].rpartition("&& ")[2] for line in text.splitlines())
            found += [(line.strip(), None) for line in lines if line.startswith("moeinf ")]
            continue
        for line in text.splitlines():
            if line.startswith("$ "):
                found.append((line[2:], []))
            else:
                said = found[-1][1]
                assert said is not None, f"{line!r} follows no command"
                said.append(line)
    return found


def plain(line: str) -> str:
    line = line.replace(f"{ANYTHING} ", "")
    for pattern, instead in VARIES:
        line = pattern.sub(instead, line)
    return line.strip()


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[tuple[Path, dict[str, str]]]:
    """Yield a new user's folder with a checkpoint, and variables of a hub with one model."""
    folder = tmp_path
    shutil.copytree(DEMO_CHECKPOINT, folder / "my-checkpoint")
    (folder / "prompts.txt").write_text("17+25=\nsort owl, fig, ant\n")
    with serve(Hub(REPOSITORY, DEMO_CHECKPOINT)) as hub:
        variables = {"HF_ENDPOINT": hub.endpoint, "HF_HOME": str(folder / "hf")}
        yield folder, {**environment(folder / "home"), **variables}


def run(line: str, machine: tuple[Path, dict[str, str]]) -> subprocess.CompletedProcess[str]:
    folder, variables = machine
    piped, _, line = line.rpartition(" | ")
    words = shlex.split(line)
    assert words[0] == "moeinf"
    text = shlex.split(piped)[1] if piped else None
    return warm.run(words[1:], variables, folder=folder, text=text, merged=True)


@pytest.mark.parametrize(
    ("page", "least"),
    [
        pytest.param(README, 7, id="README"),
        pytest.param(REFERENCE, 1, id="cli"),
        *(
            pytest.param((ROOT / f"docs/{name}.md").read_text(encoding="utf-8"), least, id=name)
            for name, least in GUIDES.items()
        ),
    ],
)
def test_every_command_does_what_it_says(
    machine: tuple[Path, dict[str, str]], page: str, least: int
) -> None:
    found = commands(page)
    assert len(found) >= least
    for line, said in found:
        done = run(line, machine)
        assert done.returncode == 0, f"{line}: {done.stdout}"
        printed = [plain(text) for text in done.stdout.splitlines()]
        for expected in said or ():
            if expected.strip() != ANYTHING:
                assert plain(expected) in printed, f"{line}: {done.stdout}"


def test_commands_within_sentences(machine: tuple[Path, dict[str, str]]) -> None:
    piped = re.findall(r"`(echo [^`]* \| moeinf [^`]*)`", README)
    assert piped
    for line in piped:
        assert run(line, machine).returncode == 0, line


def test_every_example_of_the_help_texts(machine: tuple[Path, dict[str, str]]) -> None:
    """They run in an order in which each finds the files that it needs."""
    folder, _ = machine
    (folder / "text.txt").write_text("The quick brown fox. 17+25=42")
    (folder / "Modelfile").write_text("FROM demo\nSYSTEM You are Mario.\n")
    group: Any = command_line()
    first = ("pull", "run", "trace", "simulate", "eamc")
    last = ("rm",)
    names = [name for name, command in group.commands.items() if not command.hidden]
    names.sort(key=lambda name: (name in last, name not in first, [*first, name].index(name)))
    for name in names:
        command = group.commands[name]
        for one in getattr(command, "commands", {"": command}).values():
            examples = re.findall(r"Example: (moeinf .*)", one.help)
            assert examples, f"moeinf {name} {one.name}: no example"
            for line in examples:
                if name in ("devices", "serve", "stage"):  # one takes too long, others never end
                    continue
                done = run(line, machine)
                nothing_runs = name in ("stop", "set", "top")  # they fail
                assert done.returncode == int(nothing_runs), f"{line}: {done.stdout}"


def test_every_command_and_option_of_the_table_exists() -> None:
    group: Any = command_line()
    rows = re.findall(r"^\| (`moeinf \w+[^|]*)\|(.*)\|$", REFERENCE, re.MULTILINE)
    known = {name for name, command in group.commands.items() if not command.hidden}
    named = set(re.findall(r"`moeinf (\w+)|`(\w+) MODEL`", REFERENCE))
    assert known <= {name for pair in named for name in pair}, "commands that no page names"
    for names, text in rows:
        shared = {"--json", "--quiet"}  # documented below the table
        said = set(re.findall(r"--[a-z-]+", names + text))
        for name in known & set(re.findall(r"`(?:moeinf )?(\w+)", names)):
            known.remove(name)
            command = group.commands[name]
            subcommands = getattr(command, "commands", {}).values()
            options = [
                {*p.opts, *p.secondary_opts}
                for one in (command, *subcommands)
                for p in one.params
                if p.param_type_name == "option" and not p.hidden
            ]
            assert said <= set().union(*options), f"moeinf {name} has not all of {said}"
            unsaid = [option for option in options if not option & (said | shared)]
            assert not unsaid, f"the table does not say that moeinf {name} has {unsaid}"
    assert not known, "commands without a row"
