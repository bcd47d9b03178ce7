"""Test the documents' site: its links, its generated pages, and that MkDocs builds it."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from moeinf.cli.main import command_line
from scripts import docs_site

SITE = ("cli.md", "cluster.md", "index.md", "performance/suite.md")  # files that it has
EXTRA = ("mkdocs", "material", "mkdocstrings")
NO_MKDOCS = not all(map(importlib.util.find_spec, EXTRA))


class Files:
    def get_file_from_path(self, path: str) -> object | None:
        return path if path in SITE else None


def shown(markdown: str, page: str) -> str:
    about = SimpleNamespace(file=SimpleNamespace(src_uri=page))
    return docs_site.on_page_markdown(markdown, about, None, Files())


@pytest.mark.parametrize(
    ("link", "page", "becomes"),
    [
        ("[a](cli.md)", "gguf.md", "[a](cli.md)"),
        ("[a](cli.md#sizes)", "gguf.md", "[a](cli.md#sizes)"),
        ("[a](../cluster.md#x)", "performance/suite.md", "[a](../cluster.md#x)"),
        ("[a](suite.md)", "performance/races.md", "[a](suite.md)"),
        ("[a](schemas)", "releases.md", "a"),  # a folder, which the site does not have
        ("[a](../tests/data/README.md)", "gguf.md", "a"),
        ("[a](../CHANGELOG.md)", "releases.md", "[a](CHANGELOG.md)"),
        ("[a](../../SECURITY.md#http)", "performance/suite.md", "[a](../SECURITY.md#http)"),
        ("[a](../README.md#try-it)", "gguf.md", "[a](index.md#try-it)"),
        ("[a](https://x.org/b.md)", "gguf.md", "[a](https://x.org/b.md)"),
        ("[a](#here)", "gguf.md", "[a](#here)"),
        ("![a](none.svg)", "gguf.md", "![a](none.svg)"),
    ],
)
def test_links_of_a_page(link: str, page: str, becomes: str) -> None:
    assert shown(f"See {link}.", page) == f"See {becomes}."


def test_links_from_the_top_of_the_repository() -> None:
    text = "[a](docs/gpu.md#x), ![b](docs/memory.svg), [c](README.md), [d](LICENSE)"
    moved = docs_site._from_top(text)
    assert moved == "[a](gpu.md#x), ![b](memory.svg), [c](index.md), [d](LICENSE)"


def test_the_help_of_every_command_is_on_one_page() -> None:
    page = docs_site.commands()
    group: Any = command_line()
    names = [name for name, command in group.commands.items() if not command.hidden]
    assert re.findall(r"^## moeinf (\S+)$", page, re.MULTILINE) == names
    assert page.count("```") == 2 * page.count("```text")
    assert page.count("```text") > len(names)  # some have subcommands
    assert "Usage: moeinf eamc show " in page
    assert max(map(len, page.splitlines())) <= 100


@pytest.mark.full
@pytest.mark.skipif(NO_MKDOCS, reason="pip install '.[docs]'")
def test_the_site_is_built_without_a_warning(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-q", "--site-dir"]
    ended = subprocess.run([*command, tmp_path], cwd=docs_site.ROOT, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr[-3000:]
    start = (tmp_path / "index.html").read_text(encoding="utf-8")
    assert 'href="gpu.html#what-it-needs"' in start
    assert "moeinf eamc show" in (tmp_path / "reference-cli.html").read_text(encoding="utf-8")
    assert 'id="moeinf.api.Model"' in (tmp_path / "reference-python.html").read_text("utf-8")
