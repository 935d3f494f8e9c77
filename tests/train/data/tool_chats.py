"""Chats with tools, and chat templates in the style of four families that write them."""

import json

# Results of tools that follow each other share one user turn.
QWEN = r"""
{%- if tools %}{{- '<|im_start|>system\nYou help.\n<tools>' }}
{%- for tool in tools %}{{- '\n' + tool | tojson }}{%- endfor %}
{{- '\n</tools><|im_end|>\n' }}{%- endif %}
{%- for m in messages %}
{%- if m.role == 'user' or (m.role == 'assistant' and not m.tool_calls) %}
{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}
{%- elif m.role == 'assistant' %}{{- '<|im_start|>assistant' }}
{%- if m.content %}{{- '\n' + m.content }}{%- endif %}
{%- for call in m.tool_calls %}
{{- '\n<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' }}
{{- call.function.arguments | tojson }}{{- '}\n</tool_call>' }}
{%- endfor %}{{- '<|im_end|>\n' }}
{%- else %}
{%- if messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
{{- '\n<tool_response>\n' + m.content + '\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\n' }}{%- endif %}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"""

# Thoughts of turns before the last question are removed; the last turn gets an empty one.
THINKING = r"""
{%- set ns = namespace(last=0) %}
{%- for m in messages %}
{%- if m.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}
{%- endfor %}
{%- for m in messages %}
{{- '<|im_start|>' + m.role + '\n' }}
{%- if m.role == 'assistant' and loop.index0 > ns.last %}
{%- if loop.last or m.reasoning_content %}
{{- '<think>\n' + (m.reasoning_content or '') + '\n</think>\n\n' }}
{%- endif %}
{%- endif %}
{{- m.content }}
{%- for call in m.tool_calls or [] %}
{{- '<tool_call>' + call.function.name + ' ' }}
{{- call.function.arguments | tojson }}{{- '</tool_call>' }}
{%- endfor %}{{- '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}
{%- if enable_thinking is defined and enable_thinking is false %}
{{- '<think>\n\n</think>\n\n' }}
{%- endif %}
{%- endif %}"""

# One call per turn, tools in the first question, a trained end token after every turn.
LLAMA = r"""
{%- for m in messages %}
{%- set role = 'ipython' if m.role == 'tool' else m.role %}
{{- '<|header|>' + role + '<|/header|>\n\n' }}
{%- if tools and loop.first %}{{- tools | tojson + '\n' }}{%- endif %}
{%- if m.tool_calls %}
{%- if m.tool_calls | length != 1 %}{{- raise_exception('one call only') }}{%- endif %}
{{- '<|python_tag|>{"name": "' + m.tool_calls[0].function.name + '", "parameters": ' }}
{{- m.tool_calls[0].function.arguments | tojson }}{{- '}' }}
{%- else %}{{- m.content }}{%- endif %}
{{- '<|eot|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|header|>assistant<|/header|>\n\n' }}{%- endif %}"""

# Calls as a list after the content, results as turns of their own.
HERMES = r"""
{%- if tools %}{{- '<|im_start|>system\n<tools>' + tools | tojson + '</tools><|im_end|>\n' }}
{%- endif %}
{%- for m in messages %}
{{- '<|im_start|>' + m.role }}
{%- if m.content and m.role == 'tool' %}
{{- '\n<tool_response>\n' + m.content + '\n</tool_response>' }}
{%- elif m.content %}{{- '\n' + m.content }}{%- endif %}
{%- for call in m.tool_calls or [] %}
{{- '\n<tool_call>\n' + call.function | tojson + '\n</tool_call>' }}
{%- endfor %}{{- '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"""

TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}


def call(city, as_text=False):
    arguments = {"city": city}
    arguments = json.dumps(arguments) if as_text else arguments
    return {"id": "1", "type": "function", "function": {"name": "weather", "arguments": arguments}}


def chat(**settings):
    return [
        {"role": "user", "content": "Oslo or Rome?"},
        {"role": "assistant", "content": "", "tool_calls": [call("Oslo", **settings)]},
        {"role": "tool", "content": "snow", "tool_call_id": "1"},
        {"role": "assistant", "content": "And Rome.", "tool_calls": [call("Rome", **settings)]},
        {"role": "tool", "content": "sun", "tool_call_id": "1"},
        {"role": "assistant", "content": "Rome."},
        {"role": "user", "content": "Thanks"},
        {"role": "assistant", "content": "Bye"},
    ]


def trained(tokenizer, sample) -> list[str]:
    """Return the text of every run of tokens that are trained on."""
    runs, previous = [], 0
    for token, mask in zip(sample.ids, sample.loss_mask, strict=True):
        if mask and not previous:
            runs.append([])
        if mask:
            runs[-1].append(token)
        previous = mask
    return [tokenizer.decode(run) for run in runs]
