"""Templates of our own, with the constructs of those of Nemotron-3 and Granite 4."""

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
