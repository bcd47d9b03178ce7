"""Templates of our own, with constructs of MiniMax-M2, LFM2, Solar, dots, Hunyuan, DeepSeek-V3."""

from __future__ import annotations

MINIMAX = """
{%- set opening = '<minimax:tool_call>' -%}
{%- macro namespace_of(name, list) -%}
{%- for tool in list -%}
<tool>{{ tool.function | tojson(ensure_ascii=False) }}</tool>
{% endfor -%}
{%- endmacro -%}
{%- set system, rest = none, messages -%}
{%- if messages and messages[0].role == "system" -%}
    {%- set system = messages[0] -%}
    {%- set rest = messages[1:] -%}
{%- endif -%}
{{- ']~!b[' ~ ']~b]system' ~ '\\n' }}
{%- if system and system.content -%}{{- system.content }}{%- endif -%}
{%- if tools -%}
    {{- '\\n\\n' ~ '<tools>' ~ '\\n' }}{{- namespace_of("functions", tools) }}{{- '</tools>' }}
{%- endif -%}
{{- '[e~[\\n' }}
{%- for message in rest -%}
    {%- if message.role == 'assistant' -%}
        {%- set content = message.content -%}
        {%- if '</think>' in content %}
            {%- set content = content.split('</think>')[-1].strip('\\n') %}
        {%- endif %}
        {{- ']~b]ai' ~ '\\n' ~ content }}
        {%- if message.tool_calls -%}
            {{- '\\n' ~ opening ~ '\\n' -}}
            {%- for call in message.tool_calls -%}
                {%- if call.function %}{%- set call = call.function %}{%- endif %}
                {{- '<invoke name="' + call.name + '">\\n' }}
                {%- for key, value in call.arguments.items() %}
                    {{- '<parameter name="' + key + '">' }}
                    {{- value | tojson(ensure_ascii=False) if value is not string else value }}
                    {{- '</parameter>\\n' }}
                {%- endfor %}
                {{- '</invoke>' ~ '\\n' }}
            {%- endfor -%}
            {{- '</minimax:tool_call>' }}
        {%- endif -%}
        {{- '[e~[' ~ '\\n' }}
    {%- elif message.role == 'tool' -%}
        {{- ']~b]tool' ~ '\\n<response>' ~ message.content ~ '</response>' }}{{- '[e~[\\n' -}}
    {%- elif message.role == 'user' -%}{{- ']~b]user\\n' ~ message.content ~ '[e~[\\n' }}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- ']~b]ai' ~ '\\n<think>\\n' }}{%- endif -%}
"""

LFM2 = """
{{- bos_token -}}
{%- set ns = namespace(system="") -%}
{%- if messages[0]["role"] == "system" -%}
    {%- set ns.system = messages[0]["content"] -%}
    {%- set messages = messages[1:] -%}
{%- endif -%}
{%- if tools -%}
    {%- set ns.system = ns.system + ("\\n" if ns.system else "") + "Tools: <|tool_list_start|>[" -%}
    {%- for tool in tools -%}
        {%- if tool is not string -%}{%- set tool = tool | tojson -%}{%- endif -%}
        {%- set ns.system = ns.system + tool -%}
        {%- if not loop.last -%}{%- set ns.system = ns.system + ", " -%}{%- endif -%}
    {%- endfor -%}
    {%- set ns.system = ns.system + "]<|tool_list_end|>" -%}
{%- endif -%}
{%- if ns.system -%}{{- "<|im_start|>system\\n" + ns.system + "<|im_end|>\\n" -}}{%- endif -%}
{%- for message in messages -%}
    {{- "<|im_start|>" + message["role"] + "\\n" -}}
    {%- set content = message["content"] -%}
    {%- if content is not string -%}{%- set content = content | tojson -%}{%- endif -%}
    {%- if message["role"] == "tool" -%}
        {%- set content = "<|tool_response_start|>" + content + "<|tool_response_end|>" -%}
    {%- endif -%}
    {{- content + "<|im_end|>\\n" -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- "<|im_start|>assistant\\n" -}}{%- endif -%}
"""

SOLAR = """
{%- if not (think is defined) %}{%- set think = enable_thinking | default(true) %}{%- endif %}
{%- if messages[0].role == 'system' or tools %}
    {{- "<|begin|>system<|content|>" }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content }}{%- endif %}
    {%- for tool in tools or [] %}
        {{- '\\n<|tool:start|>' ~ (tool.function | tojson) ~ '<|tool:end|>' }}
    {%- endfor %}
    {{- "<|end|>" }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'user' %}{{- "<|begin|>user<|content|>" + message.content + "<|end|>" }}
    {%- elif message.role == 'tool' %}
        {{- "<|begin|>tool<|tool_response|>" + message.content + "<|end|>" }}
    {%- elif message.role == 'assistant' %}
        {%- if message.tool_calls %}
            {{- "<|begin|>assistant<|tool_calls|>" }}
            {%- for call in message.tool_calls %}
                {{- "<|tool_call:begin|>" ~ call.id | default("0123456789") }}
                {{- "<|tool_call:name|>" ~ call.function.name ~ "<|tool_call:args|>" }}
                {{- call.function.arguments | tojson ~ "<|tool_call:end|>" }}
            {%- endfor %}
            {{- "<|calls|>" }}
        {%- else %}{{- "<|begin|>assistant<|content|>" + message.content + "<|end|>" }}
        {%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- "<|begin|>assistant" }}{{- "<|think|><|end|><|begin|>assistant" if not think }}
{%- endif %}
"""

DOTS = """{% if messages[0]['role'] == 'system' %}
{{- '<|system|>' + messages[0]['content'] + '<|endofsystem|>' }}{% set start_idx = 1 %}
{%- else %}<|system|>Be kind.<|endofsystem|>{% set start_idx = 0 %}{% endif %}
{%- for idx in range(start_idx, messages|length) %}
    {%- if messages[idx]['role'] == 'user' %}
        {{- '<|userprompt|>' + messages[idx]['content'] + '<|endofuserprompt|>' }}
    {%- elif messages[idx]['role'] == 'assistant' %}
        {{- '<|response|>' + messages[idx]['content'] + '<|endofresponse|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt and messages[-1]['role'] == 'user' %}{{ '<|response|>' }}{% endif %}"""

HUNYUAN = """
{%- set said = namespace(system='', open=false) %}
{%- for message in messages if message['role'] == 'system' %}
    {%- set said.system = said.system + message['content'] %}
{%- endfor %}
{%- if tools %}
    {%- set said.system = said.system + '\\nToday: ' + strftime_now('%Y-%m-%d') + '\\n' + (
        tools | tojson(ensure_ascii=False)) + '\\n<tool_calls>[{"name": ...}]</tool_calls>' %}
{%- endif %}
{{- '<|startoftext|>' }}{% if said.system %}{{ said.system + '<|extra_4|>' }}{% endif %}
{%- for message in messages %}
    {%- if message['role'] == 'user' %}
        {{- message['content'] + '<|extra_0|>' }}{% set said.open = false %}
    {%- elif message['role'] == 'tool' %}
        {%- if not said.open %}{{ '<tool_responses>' }}{% set said.open = true %}{% endif %}
        {{- '<tool_response>' + message['content'] + '</tool_response>' }}
        {%- if loop.last or loop.nextitem['role'] != 'tool' %}
            {{- '</tool_responses><|extra_0|>' }}
        {%- endif %}
    {%- elif message['role'] == 'assistant' and message.tool_calls %}
        {{- message['content'] + '<tool_calls>[' }}
        {%- for call in message.tool_calls %}
            {{- '{"name": "' + call.function.name + '", "arguments": ' }}
            {{- call.function.arguments | tojson(ensure_ascii=False) + '}' }}
            {%- if not loop.last %}{{ ', ' }}{% endif %}
        {%- endfor %}{{ ']</tool_calls><|eos|>' }}
    {%- elif message['role'] == 'assistant' %}
        {{- message['content'].split('</think>')[-1].lstrip('\\n') + '<|eos|>' }}
    {%- endif %}
{%- endfor %}
{%- if enable_thinking is defined and not enable_thinking %}
    {{- '<think>\\n\\n</think>\\n' }}
{%- endif %}
"""

DEEPSEEK3 = """
{%- if not thinking is defined %}{% set thinking = false %}{% endif %}
{%- set ns = namespace(is_first=false, system='', last_user=false) %}
{%- for message in messages %}{%- if message['role'] == 'system' %}
    {%- set ns.system = ns.system + message['content'] %}{%- endif %}{%- endfor %}
{{- bos_token }}{{ ns.system }}
{%- for message in messages %}
    {%- if message['role'] == 'user' %}
        {%- set ns.last_user = true -%}{{ '<｜User｜>' + message['content'] }}
    {%- endif %}
    {%- if message['role'] == 'assistant' and message['tool_calls'] %}
        {%- if ns.last_user %}{{ '<｜Assistant｜></think>' }}{%- endif %}
        {%- set ns.last_user = false -%}{%- set ns.is_first = false %}
        {%- for tool in message['tool_calls'] %}
            {{- '<｜tool▁calls▁begin｜>' if not ns.is_first }}{%- set ns.is_first = true -%}
            {{- '<｜tool▁call▁begin｜>' + tool['function']['name'] + '<｜tool▁sep｜>' }}
            {{- tool['function']['arguments'] | tojson + '<｜tool▁call▁end｜>' }}
        {%- endfor %}
        {{- '<｜tool▁calls▁end｜><｜end▁of▁sentence｜>' }}
    {%- elif message['role'] == 'assistant' %}
        {%- if ns.last_user %}{{ '<｜Assistant｜></think>' }}{%- endif %}
        {%- set ns.last_user = false -%}
        {%- set content = message['content'] -%}
        {%- if '</think>' in content %}
            {%- set content = content.split('</think>', 1)[1] -%}
        {%- endif %}
        {{- content + '<｜end▁of▁sentence｜>' }}
    {%- elif message['role'] == 'tool' %}
        {%- set ns.last_user = false -%}
        {{- '<｜tool▁output▁begin｜>' + message['content'] + '<｜tool▁output▁end｜>' }}
    {%- endif %}
{%- endfor -%}
{%- if add_generation_prompt and ns.last_user %}
    {{- '<｜Assistant｜>' }}{{- '<think>' if thinking else '</think>' }}
{%- endif %}
"""
