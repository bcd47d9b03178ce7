"""Each family's calls as its models' own pages or templates show them: names and arguments."""

from __future__ import annotations

import pytest

from moeinf.runtime.text.offered_tools import Call
from tests.runtime.text.family_formats import FORMATS
from tests.runtime.text.test_tool_calls import hear

BOTH = [Call("add", {"a": 1, "note": 'x, "y"'}), Call("now", {})]
_JSON = '{"a": 1, "note": "x, \\"y\\""}'
_HERMES = (
    f'<tool_call>\n{{"name": "add", "arguments": {_JSON}}}\n</tool_call>\n'
    '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
)
_CODER = (
    '<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n<parameter=note>\nx, "y"\n'
    "</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=now>\n</function>\n</tool_call>"
)
_GLM_46 = (
    "<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n<arg_key>note</arg_key>\n"
    '<arg_value>x, "y"</arg_value>\n</tool_call>\n<tool_call>now\n</tool_call>'
)
_GLM_47 = (
    "<tool_call>add<arg_key>a</arg_key><arg_value>1</arg_value><arg_key>note</arg_key>"
    '<arg_value>x, "y"</arg_value></tool_call><tool_call>now</tool_call>'
)
_KIMI = (
    "<|tool_calls_section_begin|><|tool_call_begin|>functions.add:0<|tool_call_argument_begin|>"
    f"{_JSON}<|tool_call_end|><|tool_call_begin|>functions.now:1<|tool_call_argument_begin|>{{}}"
    "<|tool_call_end|><|tool_calls_section_end|>"
)
_R1 = (
    f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n{_JSON}\n```"
    "<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n```json\n{}\n```"
    "<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
)
_V31 = (
    f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>add<｜tool▁sep｜>{_JSON}<｜tool▁call▁end｜>"
    "<｜tool▁call▁begin｜>now<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
)
_DSML = (
    '<｜DSML｜MARK>\n<｜DSML｜invoke name="add">\n<｜DSML｜parameter name="a" string="false">1'
    '</｜DSML｜parameter>\n<｜DSML｜parameter name="note" string="true">x, "y"'
    '</｜DSML｜parameter>\n</｜DSML｜invoke>\n<｜DSML｜invoke name="now">\n</｜DSML｜invoke>\n'
    "</｜DSML｜MARK>"
)
_MINIMAX = (
    '<minimax:tool_call>\n<invoke name="add">\n<parameter name="a">1</parameter>\n'
    '<parameter name="note">x, "y"</parameter>\n</invoke>\n<invoke name="now">\n</invoke>\n'
    "</minimax:tool_call>"
)
_HARMONY = (
    "<|channel|>commentary to=functions.add <|constrain|>json<|message|>"
    f"{_JSON}<|call|><|start|>assistant<|channel|>commentary to=functions.now "
    "<|constrain|>json<|message|>{}<|call|>"
)
_SOLAR = (
    "<|tool_calls|><|tool_call:begin|>a1b2c3d4e5<|tool_call:name|>add<|tool_call:args|>"
    f"{_JSON}<|tool_call:end|><|tool_call:begin|>f6g7h8i9j0<|tool_call:name|>now"
    "<|tool_call:args|>{}<|tool_call:end|><|calls|>"
)
_ARRAY = f'[{{"name": "add", "arguments": {_JSON}}}, {{"name": "now", "arguments": {{}}}}]'
DOCUMENTED: dict[str, tuple[str, ...]] = {
    "deepseek_v3": (_R1, _V31),
    "deepseek_v32": (_DSML.replace("MARK", "function_calls"),),
    "deepseek_v4": (_DSML.replace("MARK", "tool_calls"),),
    "ernie4_5_moe": (_HERMES,),
    "exaone_moe": (_HERMES.replace("<tool_call>\n", "<tool_call>").replace("}\n<", "}<"),),
    "gemma4": (
        '<|tool_call>call:add{a:1,note:<|"|>x, "y"<|"|>}<tool_call|>'
        "<|tool_call>call:now{}<tool_call|>",
    ),
    "glm4_moe": (_GLM_46, _GLM_47),
    "glm4_moe_lite": (_GLM_47,),
    "glm4v_moe": (_GLM_46,),
    "glm5_next": (_GLM_47,),
    "glm_moe_dsa": (_GLM_47,),
    "gpt_oss": (_HARMONY,),
    "granitemoe": (f"<|tool_call|>{_ARRAY}",),
    "granitemoehybrid": (_HERMES,),
    "hunyuan_v1_moe": (f"<tool_calls>{_ARRAY}</tool_calls>",),
    **dict.fromkeys(("kimi_k2", "kimi_k25", "kimi_linear"), (_KIMI,)),
    "laguna": (_GLM_46,),
    "lfm2_moe": ("<|tool_call_start|>[add(a=1, note='x, \"y\"'), now()]<|tool_call_end|>",),
    "mimo_v2_flash": (_CODER,),
    "minimax_m2": (_MINIMAX,),
    "mistral4": (f"[TOOL_CALLS]add[ARGS]{_JSON}[TOOL_CALLS]now[ARGS]{{}}",),
    "mixtral": (f"[TOOL_CALLS]{_ARRAY}",),
    "nemotron_h": (_CODER,),
    "qwen3_5_moe": (_CODER,),
    "qwen3_moe": (_HERMES, _CODER),  # Qwen3, Qwen3-Coder
    "qwen3_next": (_HERMES, _CODER),  # Qwen3-Next, Qwen3-Coder-Next
    "qwen4_exp": (_CODER,),
    "solar_open": (_SOLAR,),
}


def test_every_family_with_calls_has_a_text() -> None:
    assert DOCUMENTED.keys() == {family for family, one in FORMATS.items() if one.calls}


@pytest.mark.parametrize("size", [1, 1000])
@pytest.mark.parametrize("family", DOCUMENTED)
def test_the_calls_of(family: str, size: int) -> None:
    for text in DOCUMENTED[family]:
        assert hear(FORMATS[family].calls, text, size) == BOTH
