"""Templates of our own, with the constructs of Nemotron-3, Granite 4, DeepSeek-V4, Ministral 3."""

from __future__ import annotations

NEMOTRON = """
{% macro extra(values, handled) %}
    {%- if values is mapping %}
        {%- for key in values if key not in handled %}
            {%- set value = values[key] %}
            {%- if value is mapping or value is sequence and value is not string %}
                {{- '\n<' ~ key ~ '>' ~ (values[key] | tojson | safe) ~ '</' ~ key ~ '>' }}
            {%- else %}
                {{- '\n<' ~ key ~ '>' ~ (values[key] | string) ~ '</' ~ key ~ '>' }}
            {%- endif %}
        {%- endfor %}
    {%- endif %}
{% endmacro %}
{%- set enable_thinking = enable_thinking if enable_thinking is defined else True %}
{%- set ns = namespace(last_user_idx = -1) %}
{%- for m in messages %}
  {%- if m["role"] == "user" %}{%- set ns.last_user_idx = loop.index0 %}{%- endif %}
{%- endfor %}
{%- if not tools is defined %}{%- set tools = [] %}{%- endif %}
{%- if tools is iterable and tools | length > 0 %}
    {%- for tool in tools %}
        {%- if tool.function is defined %}{%- set tool = tool.function %}{%- endif %}
        {{- "<name>" ~ tool.name ~ "</name>" }}
        {%- for name, about in tool.parameters.properties|items %}
            {{- '\n<name>' ~ name ~ '</name>' }}
            {{- extra(about, ['name', 'type']) }}
        {%- endfor %}
        {% set handled = ['type', 'properties', 'required'] %}
        {{- extra(tool.parameters, handled) }}
        {{- extra(tool, ['name', 'parameters']) }}
    {%- endfor %}
    {{- "<tool_call>\n<function=example>\n</function>\n</tool_call>" }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == "assistant" %}
        {%- set content = message.content | default('', true) %}
        {%- if '</think>' not in content -%}
            {%- set content = "<think></think>" ~ content -%}
        {%- endif %}
        {%- if loop.index0 < ns.last_user_idx %}
            {%- set content = "<think></think>" ~ content.split('</think>')[-1] | trim %}
        {%- endif %}
        {{- '<|im_start|>assistant\n' ~ (content | trim) ~ '\n' -}}
        {%- for tool_call in message.tool_calls or [] %}
            {%- set tool_call = tool_call.function %}
            {{- '<tool_call>\n<function=' ~ tool_call.name ~ '>\n' -}}
            {%- for name, value in tool_call.arguments|items %}
                {{- '<parameter=' ~ name ~ '>\n' ~ (value | string) ~ '\n</parameter>\n' -}}
            {%- endfor %}
            {{- '</function>\n</tool_call>\n' -}}
        {%- endfor %}
        {{- '<|im_end|>\n' }}
    {%- elif message.role == "tool" %}
        {%- if loop.previtem and loop.previtem.role != "tool" %}
            {{- '<|im_start|>user\n' }}
        {%- endif %}
        {{- '<tool_response>\n' ~ message.content ~ '\n</tool_response>\n' }}
        {%- if loop.last or loop.nextitem.role != "tool" %}{{- '<|im_end|>\n' }}{%- endif %}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' ~ ('<think>\n' if enable_thinking else '<think></think>') }}
{%- endif %}
"""

GRANITE4 = """
{%- if available_tools is defined and available_tools %}
    {%- set tools = available_tools %}
{%- endif %}
{%- set ns = namespace(about='Tools:\n<tools>', text='') %}
{%- for tool in tools or [] %}
    {%- set ns.about = ns.about + '\n' + (tool | tojson) %}
{%- endfor %}
{%- set ns.about = ns.about + '\n</tools>\n<tool_call>\n{\"name\": <name>}\n</tool_call>' %}
{%- if messages[0].role == 'system' %}
    {%- if messages[0].content is string %}
        {%- set ns.text = messages[0].content %}
    {%- elif messages[0].content is iterable %}
        {%- for entry in messages[0].content %}
            {%- set ns.text = ns.text + entry.text %}
        {%- endfor %}
    {%- endif %}
{%- endif %}
{{- '<|start_of_role|>system<|end_of_role|>' + ns.text + (ns.about if tools else '') }}
{{- '<|end_of_text|>\n' }}
{%- for message in messages %}
    {%- set content = namespace(val=message.content if message.content is string else '') %}
    {%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
        {{- '<|start_of_role|>' + message.role + '<|end_of_role|>' + content.val }}
        {{- '<|end_of_text|>\n' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|start_of_role|>' + message.role + '<|end_of_role|>' + content.val }}
        {%- for tool_call in message.tool_calls or [] %}
            {%- if (loop.first and content.val) or (not loop.first) %}{{- '\n' }}{%- endif %}
            {%- if tool_call.function %}{%- set tool_call = tool_call.function %}{%- endif %}
            {{- '<tool_call>\n{"name": "' }}{{- tool_call.name }}{{- '", "arguments": ' }}
            {{- tool_call.arguments if tool_call.arguments is string
                else tool_call.arguments | tojson }}
            {{- '}\n</tool_call>' }}
        {%- endfor %}
        {{- '<|end_of_text|>\n' }}
    {%- elif message.role == 'tool' %}
        {%- if loop.first or (messages[loop.index0 - 1].role != 'tool') %}
            {{- '<|start_of_role|>user<|end_of_role|>' }}
        {%- endif %}
        {{- '\n<tool_response>\n' }}{{- content.val }}{{- '\n</tool_response>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_of_role|>assistant<|end_of_role|>' }}{%- endif %}"""

DEEPSEEK4 = """
{%- if not thinking is defined -%}
  {%- set thinking = enable_thinking if enable_thinking is defined else false -%}
{%- endif -%}
{%- set mark = '｜DSML｜' -%}
{%- set begin, end = '<' + mark, '</' + mark -%}
{%- set about = 'Write a "' + begin + 'tool_calls>" block:\n' + begin + 'invoke name="$NAME">\n' -%}
{%- set ns = namespace(system='', user=false) -%}
{%- for message in messages -%}
  {%- if message['role'] == 'system' -%}
    {%- set ns.system = ns.system + (message['content'] or '') -%}
  {%- endif -%}
{%- endfor -%}
{%- if tools is defined and tools -%}
  {%- set ts = namespace(schemas='') -%}
  {%- for tool in tools -%}
    {%- if tool['type'] == 'function' -%}
      {%- set ts.schemas = ts.schemas + (tool['function'] | tojson) + '\n' -%}
    {%- endif -%}
  {%- endfor -%}
  {%- set ns.system = ns.system + '\n\n' + about + ts.schemas -%}
{%- endif -%}
{%- if response_format is defined -%}{{- response_format | tojson -}}{%- endif -%}
{{- bos_token -}}{{- ns.system -}}
{%- for message in messages -%}
  {%- if message['role'] in ('user', 'tool') -%}
    {{- '\n\n' if ns.user else '<｜User｜>' -}}{%- set ns.user = true -%}
    {{- message['content'] if message['role'] == 'user'
        else '<tool_result>' + (message['content'] or '') + '</tool_result>' -}}
  {%- elif message['role'] == 'assistant' -%}
    {%- set ns.user = false -%}
    {{- '<｜Assistant｜>' -}}
    {%- if thinking and message['reasoning_content'] is defined -%}
      {{- '<think>' + message['reasoning_content'] -}}
    {%- endif -%}
    {{- '</think>' + (message['content'] or '') -}}
    {%- if message['tool_calls'] -%}
      {{- '\n\n' + begin + 'tool_calls>\n' -}}
      {%- for tool in message['tool_calls'] -%}
        {%- set args = tool['function']['arguments'] -%}
        {%- if args is string -%}{%- set args = args | from_json -%}{%- endif -%}
        {{- begin + 'invoke name="' + tool['function']['name'] + '">\n' -}}
        {%- for key, val in args.items() -%}
          {{- begin + 'parameter name="' + key + '" string="' -}}
          {{- 'true">' + val if val is string else 'false">' + (val | tojson) -}}
          {{- end + 'parameter>\n' -}}
        {%- endfor -%}
        {{- end + 'invoke>\n' -}}
      {%- endfor -%}
      {{- end + 'tool_calls>' -}}
    {%- endif -%}
    {{- '<｜end▁of▁sentence｜>' -}}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
  {{- '<｜Assistant｜>' + ('<think>' if thinking else '</think>') -}}
{%- endif -%}
"""

MISTRAL3 = """
{#- Text, or blocks of text and thinking. #}
{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}
    {{- '[SYSTEM_PROMPT]' + messages[0]['content'] + '[/SYSTEM_PROMPT]' -}}
    {%- set rest = messages[1:] %}
{%- else %}{%- set rest = messages %}{%- endif %}
{%- if tools is defined and tools is not none and tools|length > 0 %}
    {{- '[AVAILABLE_TOOLS]' + (tools| tojson) + '[/AVAILABLE_TOOLS]' }}
{%- endif %}
{%- for message in rest %}
    {%- if message['role'] == 'user' %}{{- '[INST]' + message['content'] + '[/INST]' }}
    {%- elif message['role'] == 'assistant' %}
        {%- if message['content'] is string and message['content'] != '' %}
            {{- message['content'] }}
        {%- elif message['content'] | length > 0 %}
            {%- for block in message['content'] %}
                {{- block['text'] if block['type'] == 'text'
                    else '[THINK]' + block['thinking'] + '[/THINK]' }}
            {%- endfor %}
        {%- endif %}
        {%- for tool in message['tool_calls'] or [] %}
            {%- set arguments = tool['function']['arguments'] %}
            {%- if arguments is not string %}
                {%- set arguments = arguments|tojson|safe %}
            {%- endif %}
            {{- '[TOOL_CALLS]' + tool['function']['name'] + '[ARGS]' + arguments }}
        {%- endfor %}
        {{- eos_token }}
    {%- elif message['role'] == 'tool' %}
        {{- '[TOOL_RESULTS]' + message['content']|string + '[/TOOL_RESULTS]' }}
    {%- else %}{{- raise_exception('The role is ' + message['role'] + '.') }}{%- endif %}
{%- endfor %}
"""
