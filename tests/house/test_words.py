"""Plain words in the documents, decisions in one format, a short README.

To check code with the same words, add its folder to CHECKED: docstrings and comments are read.
"""

from __future__ import annotations

import re
from pathlib import Path

from tests.house.prose import READERS, prose, sentences

ROOT = Path(__file__).parents[2]
FLOORS = ("errors", "native", "models", "offload", "runtime", "server", "api", "cli")
CODE = (*FLOORS, "benchmarks", "scripts", "tools", "tests")
CHECKED = (
    *("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "docs/**/*.md"),
    *(f"{folder}/**/*.{kind}" for folder in CODE for kind in ("py", "cpp", "h")),
)
# Each word with its replacement.
BANNED = {
    r"who(?:ever|soever)": "name it: anyone who, a client that",
    r"no ?body|every ?body|somebody": "nothing, each expert, a client",
    r"anew": "again",
    r"mend(?:s|ed|ing)?": "fix, repair",
    r"(?:is|are|was|were|be) none": "say what is missing or invalid",
    r"stands? twice": "is duplicate",
    r"want of": "lack of, out of",
    r"hears? of": "receives, learns",
    r"(?:say|says|said) so": "report, print",
    r"as (?:many|much|long|far) as may": "the limit is reached",
    r"from here on": "start",
}
ANY_BANNED = re.compile(rf"\b(?:{'|'.join(BANNED)})\b", re.IGNORECASE)
OPENINGS = ("Of", "As", "What", "Whether", "Who", "Whom")
ANY_OPENING = re.compile(rf"\b(?:{'|'.join(OPENINGS)})\b")
WORD = re.compile(r"\w")
PLACES = (*CODE, "docs")  # documents may name files of these folders
PATH = re.compile(
    rf"(?<![\w/.~$-])((?:{'|'.join(PLACES)})/[\w/.-]+\.(?:py|cpp|c|h|yaml|csv(?:\.gz)?|md|svg|png))\b"
)
PARTS = ["Problem", "Tried", "Measured", "Decided"]
DECISIONS = ROOT / "docs/decisions"


def checked() -> list[Path]:
    """Return the files that are checked for these words."""
    found = {path for pattern in CHECKED for path in ROOT.glob(pattern)}
    return sorted(path for path in found if path.suffix in READERS)


def banned_words(path: Path) -> list[str]:
    """Return every banned word of a file, with its line and its replacement."""
    if not ANY_BANNED.search(path.read_text(encoding="utf-8")):
        return []  # reading the prose takes longer
    return [
        f"{path.name}:{number}: {match[0]!r} ({instead})"
        for number, line in prose(path)
        if ANY_BANNED.search(line)
        for word, instead in BANNED.items()
        for match in re.finditer(rf"\b{word}\b", line, re.IGNORECASE)
    ]


def banned_openings(path: Path) -> list[str]:
    """Return the sentences that open with one of OPENINGS, except questions."""
    if not ANY_OPENING.search(path.read_text(encoding="utf-8")):
        return []
    return [
        f"{path.name}:{number}: {sentence[:60]!r}"
        for number, sentence in sentences(path)
        if sentence.partition(" ")[0] in OPENINGS and "?" not in sentence
    ]


def test_banned_words() -> None:
    paths = checked()
    assert len(paths) > 60
    assert [wrong for path in paths for wrong in banned_words(path)] == []


def test_openings_of_sentences() -> None:
    assert [wrong for path in checked() for wrong in banned_openings(path)] == []


def test_the_words_are_found_in_every_kind_of_file(tmp_path: Path) -> None:
    texts = {
        "a.md": "# Title\n\nA page. Of three,\nnobody is none.\n\n```\nnobody\n```\nAs `nobody`.\n",
        "a.py": '"""What it is.\n\nPlain.\n"""\n\nx = "anew"  # mends it\n',
        "a.h": "int a;  // Whether it is, says so\nint nobody;\n",
    }
    found = {}
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
        path = tmp_path / name
        lines = [wrong.split(":")[1] for wrong in banned_words(path)]
        found[name] = lines, [wrong.split(":")[1] for wrong in banned_openings(path)]
    assert found == {
        "a.md": (["4", "4"], ["3", "9"]),
        "a.py": (["6"], ["1"]),
        "a.h": (["1"], ["1"]),
    }


def test_the_readme_is_short() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len([word for word in text.split() if WORD.search(word)]) <= 1000
    assert len(text.splitlines()) <= 150


def test_files_that_documents_name_exist() -> None:
    pages = [path for path in checked() if path.suffix == ".md"]
    named = {(page.name, path) for page in pages for path in PATH.findall(page.read_text("utf-8"))}
    assert len(named) > 50
    assert [(page, path) for page, path in sorted(named) if not (ROOT / path).exists()] == []


def decisions() -> list[Path]:
    return sorted(path for path in DECISIONS.glob("*.md") if path.name != "README.md")


def test_decisions_have_four_parts_and_half_a_page() -> None:
    assert len(decisions()) >= 56
    for path in decisions():
        lines = path.read_text(encoding="utf-8").splitlines()
        assert [line[3:] for line in lines if line.startswith("## ")] == PARTS, path.name
        assert len(lines) <= 60, path.name
        assert lines[0].startswith(f"# {path.name[:4]} "), path.name


def test_the_index_has_every_decision_once() -> None:
    index = (DECISIONS / "README.md").read_text(encoding="utf-8")
    names = [path.name for path in decisions()]
    assert re.findall(r"^\| \[\d{4}\]\(([^)]+)\)", index, re.MULTILINE) == names
    assert [name[:4] for name in names] == [f"{n:04}" for n in range(1, len(names) + 1)]
    for path in decisions():
        title = path.read_text(encoding="utf-8").splitlines()[0][7:]
        assert f"| {title} |" in index, path.name
