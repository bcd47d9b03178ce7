"""Test every error of the command line: its code, its exit code and its words."""

from __future__ import annotations

import pytest

from tests.errors.provoking import Place, check_words, shown_by
from tests.errors.store_cases import CASES
from tests.errors.tree import coded


@pytest.mark.parametrize("code", sorted(CASES))
def test_an_error(code: str, place: Place) -> None:
    (kind,) = [kind for kind in coded() if kind.code == code]
    command = CASES[code](place)
    exit_code, shown = shown_by(place, command)
    assert (shown.code, exit_code) == (code, 0 if callable(command) else kind.exit_code)
    words = [f"Error: {place.plain(shown.message)}"]
    if shown.hint:
        words.append(f"Try: {place.plain(shown.hint)}")
    check_words(f"command line: {code}", words)
