"""The words, the wordings and the general questions of the demo's exercises, read from demo/."""

from __future__ import annotations

from pathlib import Path

import yaml

_FOLDER = Path(__file__).parent / "demo"


def lines(name: str) -> list[str]:
    return (_FOLDER / name).read_text(encoding="utf-8").splitlines()


def _lists() -> dict[str, list[str]]:
    text = (_FOLDER / "lists.yaml").read_text(encoding="utf-8")
    return {name: values.split(", ") for name, values in yaml.safe_load(text).items()}


_WORDINGS = yaml.safe_load((_FOLDER / "wordings.yaml").read_text(encoding="utf-8"))
Talk = dict[str, dict[str, list[str]]]  # of a kind: the prompts of each answer

IMPERATIVE, QUESTION, BARE = "imperative", "question", "bare"
SEEN: dict[str, dict[str, list[str]]] = _WORDINGS["seen"]
UNSEEN: dict[str, list[str]] = _WORDINGS["unseen"]
TALK: Talk = _WORDINGS["talk"]
UNSEEN_TALK: Talk = _WORDINGS["unseen_talk"]
OTHER: str = _WORDINGS["other"]
WORDS = " ".join(lines("words.txt")).split()
LISTS = _lists()
DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
