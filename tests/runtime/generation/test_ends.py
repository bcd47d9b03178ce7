"""Stop tokens: the union of the ids that all files name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken

from moeinf.runtime.text.tokenizer import Tokenizer, end_tokens
from scripts.make_checkpoint import byte_tokenizer

END = 256  # of the tokenizer below

CASES: list[tuple[str, dict[str, Any], set[int]]] = [
    ("none", {}, set()),
    ("deepseek: one", {"config": 100001, "generation_config": 100001}, {100001}),
    ("gpt-oss", {"config": 200002, "generation_config": [200002, 199999, 200012]},
     {200002, 199999, 200012}),
    ("phi-3.5: config says less", {"config": 32000, "generation_config": [32000, 32001, 32007]},
     {32000, 32001, 32007}),
    ("gemma-4: a result of a tool follows", {"config": 1, "generation_config": [1, 106, 50]},
     {1, 106, 50}),
    ("nemotron-3: <|im_end|> too", {"config": 2, "generation_config": [2, 11]}, {2, 11}),
    ("glm-4.5", {"config": [151329, 151336, 151338]}, {151329, 151336, 151338}),
    ("deepseek-v3.2", {"config": 1}, {1}),
    ("glm-5", {"config": [154820, 154827, 154829]}, {154820, 154827, 154829}),
    ("kimi: the tokenizer says more", {"config": 163586, "tokenizer": "<end>"}, {163586, END}),
    ("arctic: files disagree", {"config": 31999, "generation_config": 2}, {31999, 2}),
    ("the tokenizer alone knows", {"tokenizer": "<end>"}, {END}),
    ("all three", {"config": 5, "generation_config": [6], "tokenizer": {"content": "<end>"}},
     {5, 6, END}),
    ("nonsense", {"config": "x", "generation_config": [True, None, 7]}, {7}),
    ("a token that is not there", {"tokenizer": "<nowhere>"}, set()),
]  # fmt: skip


@pytest.mark.parametrize(("case", "says", "wanted"), CASES)
def test_ends(case: str, says: dict[str, Any], wanted: set[int], tmp_path: Path) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens([AddedToken("<end>", special=True)])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    for name in ("config", "generation_config"):
        if name in says:
            about = {"eos_token_id": says[name]}
            (tmp_path / f"{name}.json").write_text(json.dumps(about))
    if "tokenizer" in says:
        about = {"eos_token": says["tokenizer"]}
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(about))
    assert end_tokens(tmp_path, Tokenizer(tmp_path)) == wanted, case


def test_the_text_part_of_a_model_that_sees_counts(tmp_path: Path) -> None:
    byte_tokenizer().save(str(tmp_path / "tokenizer.json"))
    values = {"text_config": {"eos_token_id": 9}}
    (tmp_path / "config.json").write_text(json.dumps(values))
    assert end_tokens(tmp_path, Tokenizer(tmp_path)) == {9}
