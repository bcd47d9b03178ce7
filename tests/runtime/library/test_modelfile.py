"""Test Modelfiles: Ollama's grammar, its errors, and files that are read back as they were."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moeinf.runtime.invalid import InvalidValue
from moeinf.runtime.library.defaults import DefaultMessage, Defaults, with_defaults
from moeinf.runtime.library.modelfile import (
    BadModelfile,
    Modelfile,
    parameter_lines,
    parse_modelfile,
    quoted,
    set_parameter,
)

WHOLE = '''# a comment
from  demo:q8

SYSTEM """You are
  "Mario",  \r
a plumber."""
Parameter temperature 0.5
PARAMETER stop "User: "
PARAMETER stop <|end|>
PARAMETER num_gpu 99
PARAMETER repetition_penalty 1.5
MESSAGE user Is Toronto in Canada? # yes
MESSAGE assistant "yes
it is"
LICENSE """"""
TEMPLATE {{ messages[-1].content }}
LICENSE MIT
'''


def test_the_grammar() -> None:
    found = parse_modelfile("\ufeff" + WHOLE, "Modelfile")
    assert found.base == "demo:q8"
    assert found.system == 'You are\n  "Mario",  \na plumber.'
    assert found.parameters == {
        "temperature": 0.5,
        "stop": ["User: ", "<|end|>"],
        "repeat_penalty": 1.5,
    }
    assert found.without_effect == ["num_gpu"]
    assert found.messages == [
        DefaultMessage("user", "Is Toronto in Canada? # yes"),
        DefaultMessage("assistant", "yes\nit is"),
    ]
    assert found.licences == ["", "MIT"]
    assert found.template == "{{ messages[-1].content }}"
    options = found.defaults().options
    assert options.limits.stop == ("User: ", "<|end|>")
    assert options.sampling.repeat_penalty == 1.5


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ("FROM x\nADAPTER ./lora", 2, "adapters (LoRA) are not supported"),
        ("FROM x\n\nSYSTEM", 3, "SYSTEM has no value"),
        ('FROM x\nSYSTEM """a\nb', 2, "the closing"),
        ("FROM x\nFROM y", 2, "a second time"),
        ("FROM x\nPARAMETER spice 1", 2, "'spice' is not supported (expected temperature"),
        ("FROM x\nPARAMETER top_k many", 2, "top_k: many is invalid (expected an integer)"),
        ("FROM x\nPARAMETER top_p 2", 2, "top_p must be from 0 to 1"),
        ("FROM x\nPARAMETER temperature", 2, "needs a name and a value"),
        ("FROM x\nPARAMETER num_ctx 0", 2, "num_ctx must be at least 1"),
        ("FROM x\nMESSAGE tool hi", 2, "expected one of system, user, assistant"),
        ("FROM x\nTEMPLATE {{ .Prompt }}", 2, "{{ messages[-1].content }} for {{ .Prompt }}"),
        ("FROM x\nTEMPLATE {{- if .System }}a{{ end }}", 2, "Go template"),
        ("FROM x\nINSTRUCT hi", 2, "INSTRUCT is not supported (expected FROM, SYSTEM"),
    ],
)
def test_errors_name_file_and_line(text: str, line: int, words: str) -> None:
    with pytest.raises(BadModelfile) as caught:
        parse_modelfile(text, "dir/Modelfile")
    assert str(caught.value).startswith(f"dir/Modelfile, line {line}: ")
    assert words in str(caught.value)


def test_a_file_without_from() -> None:
    with pytest.raises(BadModelfile, match="it has no FROM"):
        parse_modelfile("SYSTEM x\n", "M")


@settings(max_examples=300, deadline=None)
@given(st.text(st.sampled_from('a" \n#'), max_size=12))
def test_quoted_texts_are_read_back(text: str) -> None:
    value = quoted(text)
    if value is None:  # both marks end a line before the last one
        assert any(part.rstrip().endswith('"') for part in text.split("\n")[:-1])
        return
    found = parse_modelfile(f"FROM x\nSYSTEM {value}\nPARAMETER seed 1", "M")
    assert (found.system, found.parameters) == (text, {"seed": 1})


def test_defaults_fill_those_of_the_base() -> None:
    base = Defaults(
        "demo", "old", "t", {"seed": 1, "top_k": 2}, (DefaultMessage("user", "a"),), ("MIT",)
    )
    new = Defaults("mario", "new", None, {"seed": 3}, (), ("MIT", "BSD"))
    merged = Defaults(
        "mario", "new", "t", {"seed": 3, "top_k": 2}, (DefaultMessage("user", "a"),), ("MIT", "BSD")
    )
    assert new.over(base) == merged
    assert parameter_lines(merged) == [("seed", "3"), ("top_k", "2")]


def test_defaults_stand_before_a_request() -> None:
    user, own = {"role": "user", "content": "q"}, {"role": "system", "content": ""}
    given = Defaults(
        "demo", system="s", messages=(DefaultMessage("user", "a"), DefaultMessage("assistant", "b"))
    )
    said = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    assert with_defaults(None, [user]) == [user]
    assert with_defaults(given, [user]) == [{"role": "system", "content": "s"}, *said, user]
    assert with_defaults(given, [own, user]) == [own, *said, user]  # even an empty one is stronger


def test_texts_are_bounded() -> None:
    long, most = "x" * ((64 << 10) + 1), "x" * (64 << 10)
    for name, about in (
        ("system", Defaults("demo", system=long)),
        ("template", Defaults("demo", template=long)),
        ("license", Defaults("demo", licences=(most, long))),
    ):
        with pytest.raises(InvalidValue, match=f"{name}: 65537 bytes are invalid"):
            about.check()
    with pytest.raises(InvalidValue, match="the texts have 1114112 bytes"):
        Defaults("demo", licences=(most,) * 17).check()
    found = Modelfile()
    with pytest.raises(InvalidValue, match="stop: a text is too long"):
        set_parameter(found, "stop", "x" * 1025)
    with pytest.raises(InvalidValue, match="stop: the value is invalid"):
        set_parameter(found, "stop", [1])
