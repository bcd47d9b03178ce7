"""Give the documents' site what is outside docs/: the README, generated references, links.

MkDocs calls the functions `on_…` (mkdocs.yml). Nothing is written into docs/.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import typer

from moeinf.cli.main import command_line

ROOT = Path(__file__).resolve().parents[1]
_PAGES = {
    "README.md": "index.md",
    "SECURITY.md": "SECURITY.md",
    "CHANGELOG.md": "CHANGELOG.md",
    "CONTRIBUTING.md": "CONTRIBUTING.md",
}
_LINK = re.compile(r"(?<!!)\[([^\]]*)\]\((?!https?:|#)([^)#]+)(#[^)]*)?\)")
_PYTHON = """# Python

[python.md](python.md) explains how these classes are used.

::: moeinf.api
"""


def on_files(files: Any, config: Any) -> Any:
    """Add the pages from the top of the repository, and those that are generated."""
    from mkdocs.structure.files import File  # the rest of this file needs no MkDocs

    for source, page in _PAGES.items():
        text = (ROOT / source).read_text(encoding="utf-8")
        files.append(File.generated(config, page, content=_from_top(text)))
    files.append(File.generated(config, "reference-cli.md", content=commands()))
    files.append(File.generated(config, "reference-python.md", content=_PYTHON))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Keep only the words of a link to a file that the site does not have."""
    here = Path(page.file.src_uri).parent

    def one(match: re.Match[str]) -> str:
        words, target, anchor = match[1], match[2], match[3] or ""
        if page_of := _PAGES.get(_joined(Path("docs") / here, target)):
            up = "../" * len(here.parts)
            return f"[{words}]({up}{page_of}{anchor})"
        known = files.get_file_from_path(_joined(here, target)) is not None
        return match[0] if known else words

    return _LINK.sub(one, markdown)


def _joined(here: Path, target: str) -> str:
    parts: list[str] = []
    for part in (here / target).parts:
        if part == ".." and parts:
            parts.pop()
        else:
            parts.append(part)
    return "/".join(parts)


def _from_top(text: str) -> str:
    """Rewrite the links of a page at the top of the repository for a page in docs/."""
    text = re.sub(r"\]\(docs/", "](", text)
    return text.replace("](README.md)", "](index.md)")


def commands() -> str:
    """Return a page with the help of every command, as the command line prints it."""
    lines = ["# Commands", "", "[cli.md](cli.md) explains sizes, variables and exit codes.", ""]
    group: Any = command_line()
    for name, command in group.commands.items():
        if command.hidden:
            continue
        lines += [f"## moeinf {name}", ""]
        for part, one in getattr(command, "commands", {"": command}).items():
            title = f"moeinf {name} {part}".strip()
            context = typer.Context(one, info_name=title, terminal_width=96)
            lines += ["```text", one.get_help(context).strip(), "```", ""]
    return "\n".join(lines)
