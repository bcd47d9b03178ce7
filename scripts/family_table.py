"""Write docs/families.md: which tests prove what of each family, as pytest collects them.

A test compares the file with the text written here, and fails for a family with an empty cell.

    python -m scripts.family_table
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from moeinf.runtime.hub.aliases import registry
from tests.runtime.text.family_formats import FORMATS
from tests.selection import families_of

ROOT = Path(__file__).resolve().parents[1]
PATH = ROOT / "docs" / "families.md"
_ENGINE, _GPU = "tests/runtime/engine", "tests/runtime/dense/test_dense_on_gpu.py"
_GGUF, _TEXT = "tests/runtime/gguf", "tests/runtime/text/test_family_formats.py"
_CALLS = "tests/runtime/text/test_documented_calls.py::test_the_calls_of"
_LOGITS = "tests/models/test_families.py"
_PAIRS = "tests/models/seq2seq/test_encoder_decoders.py"
_TOKENS = "test_float32_equals_transformers_token_for_token"
_AGAIN = f"{_GGUF}/test_round_trip.py::test_exported_and_read_back_are_the_same_logits"
COLUMNS: Mapping[str, tuple[str, ...]] = {  # what -> tests, of which each case is of one family
    "f32": (f"{_LOGITS}::test_decode", f"{_PAIRS}::test_decode"),
    "odd": (f"{_LOGITS}::test_decode", f"{_PAIRS}::test_decode"),
    "bf16": (f"{_LOGITS}::test_bfloat16", f"{_PAIRS}::test_bfloat16"),
    "pieces": (f"{_LOGITS}::test_chunked_prefill",
               "tests/models/test_windows.py::test_a_window_equals_its_pieces",
               f"{_ENGINE}/test_long_prompts.py::test_logits_after_two_chunks",
               f"{_PAIRS}::test_several_tokens_at_once"),
    "back": (f"{_LOGITS}::test_truncate_and_snapshot", f"{_PAIRS}::test_truncate_and_snapshot",
             "tests/models/layers/test_recurrent.py::test_long_texts_and_what_is_left_of_them"),
    "greedy": (f"{_ENGINE}/test_families.py::{_TOKENS}",),
    "q8": (f"{_ENGINE}/test_quantised_families.py::test_near_the_reference",),
    "q4": (f"{_ENGINE}/test_quantised_families.py::test_near_the_reference",),
    "GPU": (f"{_GPU}::{_TOKENS}", f"{_GPU}::test_encoder_decoders",
            "tests/runtime/dense/test_recent_on_gpu.py::test_logits_are_near_the_cpus"),
    "template": (f"{_TEXT}::test_template_of",),
    "tools": (f"{_TEXT}::test_tool_calls_of", _CALLS),
    "read": (f"{_GGUF}/test_architectures.py::test_a_file_is_the_checkpoint_that_it_was_made_of",
             _AGAIN),
    "written": (f"{_GGUF}/writing/test_like_the_converter.py::test_exported_files", _AGAIN),
}  # fmt: skip
_MEANINGS = {
    "f32": "logits of prefill and decode in float32 are those of transformers",
    "odd": "the same for odd configurations, which are all but one",
    "bf16": "the same in bfloat16: at most 1.5 times the error of transformers",
    "pieces": "the same logits of a prompt in chunks, and in a window of several chunks",
    "back": "the same after `truncate`, and of a `snapshot`",
    "greedy": "greedy tokens are those of transformers, with all experts in memory and the least",
    "q8": "logits with weights in q8 are within 2 % of those on the widened weights",
    "q4": "the same in q4",
    "GPU": "greedy tokens or logits on a strict fake of a GPU; no kernel ran on hardware",
    "template": "a chat template with the constructs of the published one gives transformers' text",
    "tools": "the published format of tool calls is parsed, also character by character",
    "read": "a GGUF file by the rules of llama.cpp's converter, or ours, gives the checkpoint",
    "written": "our GGUF file has the converter's keys and tensors, or gives the same logits again",
}
_SEQ2SEQ = "tests/runtime/generation/test_seq2seq.py"
_ELSEWHERE = f"an encoder-decoder: `pytest {_SEQ2SEQ}`"
_NO_GGUF = "llama.cpp has no such architecture"
_PAIRED = {"greedy": _ELSEWHERE, "read": _NO_GGUF, "written": _NO_GGUF}
REASONS: Mapping[tuple[str, str], str] = {  # for a cell without a test
    **{(f, what): words for f in ("nllb-moe", "switch_transformers") for what, words in
       _PAIRED.items()},
    **{(f, "template"): one.no_template for f, one in FORMATS.items() if one.no_template},
    **{(f, "tools"): one.no_calls for f, one in FORMATS.items() if one.no_calls},
}  # fmt: skip
_BEGIN = """# Families and their tests

`python -m scripts.family_table` writes this page from the tests that pytest collects; do not edit
it. The number in a cell is that of the test cases, and a letter is the reason for a cell without
one. A family without a case or a reason fails a test.

This command runs all cases of a family by its `model_type`, and those of families whose names
contain it:

```text
pytest -m "full or not full" -k qwen4_exp
```

"""
_LACKING = """
## Models without a published config

The parameter counts of models with a short name are computed from their published `config.json`.
Those of these models are computed from published values (`tests/data/sizes.json`), because the
whole file could not be had. `tests/data/README.md` names the source of each:
{names}.
`moeinf show NAME` prints what is known of each without a network. `moeinf plan NAME` and
`moeinf pull NAME` read the repository itself.
"""


class Collected:
    """A plugin of pytest that counts the cases of each family by test."""

    def __init__(self) -> None:
        self.cases: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
        self.full: set[str] = set()  # families that `-m full -k FAMILY` finds

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        for item in session.items:
            values = list(item.callspec.params.values()) if hasattr(item, "callspec") else []
            test, _, _ = item.nodeid.partition("[")
            for family in families_of(values) | FORMATS.keys() & set(filter(_is_text, values)):
                self.cases[test][family].append(item.nodeid)
                if item.get_closest_marker("full") is not None:
                    self.full.add(family)


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def collected() -> Collected:
    """Collect the tests of the table, in this process, and run none."""
    plugin, files = (
        Collected(),
        {test.partition("::")[0] for one in COLUMNS.values() for test in one},
    )
    options = ["--collect-only", "-qq", "-m", "full or not full", "-p", "no:cacheprovider"]
    status = pytest.main([*options, *(str(ROOT / file) for file in sorted(files))], [plugin])
    assert status == 0, status
    return plugin


def count(found: Collected, family: str, what: str) -> int:
    """Return the number of cases of a cell."""
    tests = COLUMNS[what]
    cases = [case for test in tests for case in found.cases[test].get(family, ())]
    if what == "odd":
        return max(len(cases) - 1, 0)
    return sum(what not in ("q8", "q4") or case.endswith(f"-{what}]") for case in cases)


def written(found: Collected) -> str:
    """Return the page. Raises ValueError for a cell without a case and without a reason."""
    reasons: list[str] = []
    rows = [
        f"| `{family}` | " + " | ".join(_cells(found, family, reasons)) + " |"
        for family in sorted(FORMATS)
    ]
    head = "| `model_type` | " + " | ".join(COLUMNS) + " |"
    lines = [head, "|---" * (1 + len(COLUMNS)) + "|", *rows, ""]
    lines += [f"- {chr(97 + number)}: {words}" for number, words in enumerate(reasons)]
    lines += ["", "| column | what is shown | by |", "|---|---|---|"]
    for what, tests in COLUMNS.items():
        lines.append(f"| {what} | {_MEANINGS[what]} | {', '.join(f'`{test}`' for test in tests)} |")
    return _BEGIN + "\n".join(lines) + "\n" + _LACKING.format(names=", ".join(lacking()))


def _cells(found: Collected, family: str, reasons: list[str]) -> Iterator[str]:
    for what in COLUMNS:
        cases, reason = count(found, family, what), REASONS.get((family, what))
        if bool(cases) == bool(reason):
            raise ValueError(f"{family}: {what} has {cases} cases and the reason {reason!r}")
        if reason is None:
            yield str(cases)
            continue
        if reason not in reasons:
            reasons.append(reason)
        yield chr(97 + reasons.index(reason))


def lacking() -> list[str]:
    """Return the short names of models whose published config is not in tests/data."""
    sizes = json.loads((ROOT / "tests" / "data" / "sizes.json").read_text("utf-8"))
    return [f"`{name}`" for name in sorted(sizes) if name in registry()]


def main() -> None:
    found = collected()
    text = written(found)
    assert found.full >= FORMATS.keys(), FORMATS.keys() - found.full
    if sys.argv[1:] == ["--check"]:
        assert PATH.read_text("utf-8") == text, "python -m scripts.family_table writes it again"
        return
    PATH.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
