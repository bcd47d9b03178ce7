"""Chat templates in the style of Gemma 4 and Kimi-K2, for tests."""

GEMMA = """
{%- macro value_of(value, quote_keys=True) -%}
    {%- if value is string -%}{{- '<|"|>' + value + '<|"|>' -}}
    {%- elif value is boolean -%}{{- 'true' if value else 'false' -}}
    {%- elif value is mapping -%}
        {{- '{' -}}
        {%- for key, one in value | dictsort -%}
            {{- '<|"|>' + key + '<|"|>' if quote_keys else key -}}
            :{{- value_of(one, quote_keys=quote_keys) -}}{{- ',' if not loop.last -}}
        {%- endfor -%}
        {{- '}' -}}
    {%- elif value is sequence -%}
        [{%- for one in value -%}{{- value_of(one, quote_keys) -}}{{- ',' if not loop.last -}}
        {%- endfor -%}]
    {%- else -%}{{- value -}}{%- endif -%}
{%- endmacro -%}
{%- macro without_thoughts(text) -%}
    {%- set ns = namespace(result='') -%}
    {%- for part in text.split('<channel|>') -%}
        {%- set ns.result = ns.result + part.split('<|channel>')[0] -%}
    {%- endfor -%}
    {{- ns.result | trim -}}
{%- endmacro -%}
{%- set ns, rest = namespace(before=None), messages -%}
{{- bos_token -}}
{%- if enable_thinking or tools or messages[0]['role'] in ['system', 'developer'] -%}
    {{- '<|turn>system\n' -}}{{- '<|think|>\n' if enable_thinking | default(false) -}}
    {%- if messages[0]['role'] in ['system', 'developer'] -%}
        {{- messages[0]['content'] | trim -}}{%- set rest = messages[1:] -%}
    {%- endif -%}
    {%- for tool in tools or [] %}
        {{- '<|tool>declaration:' + tool['function']['name'] -}}
        {{- value_of(tool['function']['parameters'], False) | upper -}}<tool|>
    {%- endfor %}
    {{- '<turn|>\n' -}}
{%- endif %}
{%- for message in rest -%}
    {%- if message['role'] != 'tool' -%}
        {{- '<|turn>' + ('model' if message['role'] == 'assistant' else message['role']) + '\n' }}
        {%- set ns.before = None -%}
        {%- for call in message['tool_calls'] or [] -%}
            {{- '<|tool_call>call:' + call['function']['name'] -}}
            {{- value_of(call['function']['arguments'], quote_keys=False) -}}<tool_call|>
            {%- set ns.before = 'call' -%}
        {%- endfor -%}
        {%- for k in range(loop.index0 + 1, rest | length) -%}
            {%- if ns.before and rest[k].get('role') == 'tool' -%}
                {{- '<|tool_response>response:' + rest[k].get('name') | default('x', true) -}}
                {{- '{value:' + value_of(rest[k].get('content')) + '}<tool_response|>' -}}
                {%- set ns.before = 'result' -%}
            {%- endif -%}
        {%- endfor -%}
        {{- without_thoughts(message['content']) -}}
        {%- if ns.before != 'result' -%}{{- '<turn|>\n' -}}{%- endif -%}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt and ns.before != 'result' -%}
    {{- '<|turn>model\n' -}}
    {%- if not enable_thinking | default(false) -%}{{- '<|channel>thought\n<channel|>' -}}
    {%- endif -%}
{%- endif -%}
"""

KIMI = """
{%- macro render_content(message) -%}
    {%- set content = message.get('content') -%}
    {%- if content is string -%}
        {{ content }}
    {%- elif content is not none -%}
        {%- for part in content -%}{{ part['text'] }}{%- endfor -%}
    {%- endif -%}
{%- endmacro -%}
{%- if tools -%}
    <|im_system|>tool_declare<|im_middle|>{{ tools | tojson }}<|im_end|>
{%- endif -%}
{%- for message in messages -%}
    {%- if loop.first and messages[0]['role'] != 'system' -%}
        <|im_system|>system<|im_middle|>You are kind.<|im_end|>
    {%- endif -%}
    {%- set role_name = message.get('name') or message['role'] -%}
    {%- if message['role'] in ('user', 'assistant') -%}
        <|im_{{ message['role'] }}|>{{ role_name }}<|im_middle|>
    {%- else -%}
        <|im_system|>{{ role_name }}<|im_middle|>
    {%- endif -%}
    {%- if message['role'] == 'assistant' and message.get('tool_calls') -%}
        {{ render_content(message) }}<|tool_calls_section_begin|>
        {%- for call in message['tool_calls'] -%}
            {%- set id = 'functions.' + call['function']['name'] + ':' + loop.index0|string -%}
            <|tool_call_begin|>{{ id }}<|tool_call_argument_begin|>
            {{- call['function']['arguments'] | tojson }}<|tool_call_end|>
        {%- endfor -%}
        <|tool_calls_section_end|>
    {%- elif message['role'] == 'tool' -%}
        ## Return of {{ message.get('tool_call_id', 'functions.unknown:0') }}
{{ render_content(message) }}
    {%- else -%}
        {{ render_content(message) }}
    {%- endif -%}
    <|im_end|>
{%- endfor -%}
{%- if add_generation_prompt -%}
    <|im_assistant|>assistant<|im_middle|>
{%- endif -%}
"""
