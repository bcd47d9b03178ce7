"""Test that every command in a code block of the documents is one that its program takes.

tests/cli/test_readme.py runs those of the README and the guides. Others need files, machines or
hours. Their command, options and short names are checked here, without running them.
"""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from moeinf.cli.main import command_line
from moeinf.runtime.hub.aliases import entry_of

ROOT = Path(__file__).parents[2]
PAGES = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("docs/performance/*.md")]
BLOCK = re.compile(r"^( *)```(sh|console|text)\n(.*?)^\1```", re.DOTALL | re.MULTILINE)
OURS = re.compile(r"(?:^|&& |\w=\S+ |exec moeinf )(moeinf [a-z].*)")
PROGRAM = re.compile(r"(?:^|&& )python (?:-m (\w[\w.]*)|(\w+/[\w/]+\.py))(.*)")
RAY = re.compile(r"(?:^|&& )ray (.*)")
PYTEST = re.compile(r"(?:^|&& )pytest (.*)")


def lines(text: str) -> Iterator[str]:
    """Yield the commands in the code blocks of a page, without their comments."""
    for _, kind, block in BLOCK.findall(text):
        for line in block.replace("\\\n", " ").splitlines():
            command = line.partition(" #")[0].strip()
            if kind != "console" or command.startswith("$ "):
                yield command.removeprefix("$ ")


def found(pattern: re.Pattern[str]) -> Iterator[tuple[str, re.Match[str]]]:
    for page in PAGES:
        for line in lines(page.read_text(encoding="utf-8")):
            if match := pattern.search(line):
                yield page.name, match


def refused(words: list[str]) -> str:
    """Return what the command line has against a command; nothing if it would run it."""
    command: Any = command_line()
    name = "moeinf"
    while commands := getattr(command, "commands", None):
        name = words.pop(0)
        if name not in commands:
            return f"there is no command {name}"
        command = commands[name]
    try:
        given = command.make_context(name, words).params
    except typer.TyperException as error:
        return str(error.format_message())
    model = given.get("model") or ""
    short = re.fullmatch(r"[a-z][a-z0-9.-]*", model)
    if name == "pull" and short and model != "demo" and entry_of(model) is None:
        return f"{model} is not a short name"
    return ""


def unknown_options(source: Path, words: list[str]) -> list[str]:
    """Return the options that neither a program nor a module of ours that it imports spells."""
    texts = [source.read_text(encoding="utf-8")]
    for node in ast.walk(ast.parse(texts[0])):
        if isinstance(node, ast.ImportFrom) and node.module:
            folder = ROOT / node.module.replace(".", "/")
            paths = [folder.with_suffix(".py"), *(folder / f"{n.name}.py" for n in node.names)]
            texts += [path.read_text(encoding="utf-8") for path in paths if path.is_file()]
    options = [word.partition("=")[0] for word in words if re.match(r"--\w", word)]
    return [option for option in options if not any(f'"{option}"' in text for text in texts)]


def test_the_command_line_takes_every_command() -> None:
    cases = [(page, match[1]) for page, match in found(OURS)]
    assert len(cases) > 40
    faults = [(page, line, refused(shlex.split(line)[1:])) for page, line in cases]
    assert [fault for fault in faults if fault[2]] == []


def test_a_report_of_a_bug_has_what_the_doctor_found() -> None:
    form = yaml.safe_load((ROOT / ".github/ISSUE_TEMPLATE/bug.yml").read_text(encoding="utf-8"))
    fields = {one["id"]: one["attributes"] for one in form["body"]}
    commands = {
        name: re.findall(r"`moeinf ([^`]+)`", about.get("description", ""))
        for name, about in fields.items()
    }
    assert commands["machine"][0] == "doctor --json"
    assert fields["machine"]["render"] == "json"
    assert commands["version"] == ["--version"]
    assert [refused(shlex.split(line)) for line in commands["machine"]] == ["", ""]


@pytest.mark.full  # the import of Ray takes seconds
def test_ray_takes_every_command() -> None:
    scripts = pytest.importorskip("ray.scripts.scripts", reason="pip install 'moeinf[cluster]'")
    cases = [shlex.split(match[1]) for _, match in found(RAY)]
    assert len(cases) > 2
    for name, *words in cases:
        scripts.cli.commands[name].make_context(name, words)  # an unknown option is an error


def test_every_program_exists_and_has_its_options() -> None:
    faults, count = [], 0
    for page, match in found(PROGRAM):
        module, script, rest = match.groups()
        if module and module.partition(".")[0] not in ("benchmarks", "scripts", "tools"):
            continue
        path = ROOT / (script or f"{module.replace('.', '/')}.py")
        if module and not path.exists():
            path = path.with_suffix("") / "__main__.py"
        count += 1
        missing = unknown_options(path, shlex.split(rest)) if path.exists() else [path.name]
        faults += [(page, match[0], missing)] if missing else []
    assert count > 15
    assert faults == []


def test_every_test_that_a_block_runs_exists() -> None:
    words = [(page, word) for page, match in found(PYTEST) for word in shlex.split(match[1])]
    paths = [(page, word) for page, word in words if word.startswith("tests/")]
    assert len(paths) > 3
    assert [path for path in paths if not (ROOT / path[1]).exists()] == []


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ("run demo 17+25=", ""),
        ("eval demo --against demo:q8", "--file"),
        ("run demo --memroy 30%", "--memroy"),
        ("eamc dance demo", "dance"),
        ("pull olmo", "short name"),
    ],
)
def test_wrong_commands_are_refused(line: str, fault: str) -> None:
    said = refused(shlex.split(line))
    assert fault in said
    assert bool(fault) == bool(said)
