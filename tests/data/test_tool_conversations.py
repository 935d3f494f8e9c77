"""Conversations with tools: what is trained on under templates in the style of four families.

The tokenizer has one token per byte, so that the trained tokens read as text.
"""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from hybridengine.config import SFTDataConfig
from hybridengine.data import DataError
from hybridengine.data.conversations import SFTDataset
from tests.data.rows import write_jsonl

SPECIAL = ["<|im_start|>", "<|im_end|>", "<|eot|>", "<|header|>", "<|/header|>", "<|python_tag|>"]

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


@pytest.fixture(scope="module")
def tokenizer():
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(SPECIAL)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<|im_end|>", additional_special_tokens=SPECIAL
    )


def read(tmp_path, tokenizer, template, rows):
    files = rows if isinstance(rows, str) else write_jsonl(tmp_path / "rows.jsonl", rows)
    data = SFTDataConfig(
        train_files=files, messages_key="messages", chat_template=template, max_length=4096
    )
    return SFTDataset(files, tokenizer, data)


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


@pytest.mark.parametrize("as_text", [False, True])
def test_qwen_style(tmp_path, tokenizer, as_text):
    rows = [{"messages": chat(as_text=as_text), "tools": [TOOL]}]
    [sample] = read(tmp_path, tokenizer, QWEN, rows)
    oslo, rome = (
        f'<tool_call>\n{{"name": "weather", "arguments": {{"city": "{city}"}}}}\n</tool_call>'
        for city in ("Oslo", "Rome")
    )
    assert trained(tokenizer, sample) == [
        f"{oslo}<|im_end|>",
        f"And Rome.\n{rome}<|im_end|>",
        "Rome.<|im_end|>",
        "Bye<|im_end|>",
    ]
    full = tokenizer.apply_chat_template(
        chat(), tools=[TOOL], chat_template=QWEN, tokenize=True, return_dict=True
    )
    assert list(sample.ids) == full["input_ids"]
    assert "The weather of a city." in tokenizer.decode(list(sample.ids))


def test_several_results_in_a_row(tmp_path, tokenizer):
    messages = [
        {"role": "user", "content": "Both"},
        {"role": "assistant", "content": "", "tool_calls": [call("Oslo"), call("Rome")]},
        {"role": "tool", "content": "snow"},
        {"role": "tool", "content": "sun"},
        {"role": "assistant", "content": "Rome."},
    ]
    [sample] = read(
        tmp_path, tokenizer, QWEN, [{"messages": messages, "tools": json.dumps([TOOL])}]
    )
    first, second = trained(tokenizer, sample)
    assert first.count("<tool_call>") == 2 and "snow" not in first + second
    assert second == "Rome.<|im_end|>"


def test_llama_style(tmp_path, tokenizer):
    [sample] = read(tmp_path, tokenizer, LLAMA, [{"messages": chat(), "tools": [TOOL]}])
    oslo, rome = (
        f'<|python_tag|>{{"name": "weather", "parameters": {{"city": "{city}"}}}}<|eot|>'
        for city in ("Oslo", "Rome")
    )
    assert trained(tokenizer, sample)[:2] == [oslo, rome]
    assert trained(tokenizer, sample)[2:] == ["Rome.<|eot|>", "Bye<|eot|>"]


def test_hermes_style(tmp_path, tokenizer):
    [sample] = read(tmp_path, tokenizer, HERMES, [{"messages": chat(), "tools": [TOOL]}])
    first, *_, last = trained(tokenizer, sample)
    assert first.startswith("<tool_call>\n{") and '"Oslo"' in first and "snow" not in first
    assert first.endswith("</tool_call><|im_end|>") and last == "Bye<|im_end|>"


@pytest.mark.parametrize("thinking", [None, True, False])
def test_an_empty_thought_of_the_last_turn_only(tmp_path, tokenizer, thinking):
    row = {"messages": chat(), "enable_thinking": thinking}
    [sample] = read(tmp_path, tokenizer, THINKING, [row])
    oslo, rome = (
        f'<tool_call>weather {{"city": "{c}"}}</tool_call><|im_end|>' for c in ("Oslo", "Rome")
    )
    thought = "" if thinking is False else "<think>\n\n</think>\n\n"
    assert trained(tokenizer, sample) == [
        oslo,
        f"And Rome.{rome}",
        "Rome.<|im_end|>",
        f"{thought}Bye<|im_end|>",
    ]


def test_thoughts_between_tool_calls(tmp_path, tokenizer):
    messages = chat()[:6]
    for turn, thought in ((1, "cold?"), (3, "warm?"), (5, "done")):
        messages[turn]["reasoning_content"] = thought
    [sample] = read(tmp_path, tokenizer, THINKING, [{"messages": messages}])
    starts = [text.split("</think>")[0] for text in trained(tokenizer, sample)]
    assert starts == [f"<think>\n{t}\n" for t in ("cold?", "warm?", "done")]


def test_a_thought_that_a_later_turn_removes_is_an_error(tmp_path, tokenizer):
    messages = chat()
    messages[5]["reasoning_content"] = "warm"
    with pytest.raises(DataError, match="changes turn 5 when other turns are there"):
        read(tmp_path, tokenizer, THINKING, [{"messages": messages}])


def test_verls_parquet_schema(tmp_path, tokenizer):
    """Objects of a column share their keys there: what a message lacks is null."""
    other = {"name": "sum", "arguments": {"terms": [1, 2]}}
    rows = [
        {"messages": chat(), "tools": [TOOL], "enable_thinking": False},
        {
            "messages": [
                {"role": "user", "content": "1 + 2"},
                {"role": "assistant", "content": None, "tool_calls": [{"function": other}]},
            ],
            "tools": [TOOL, {"type": "function", "function": {"name": "sum"}}],
            "enable_thinking": None,
        },
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    first, second = read(tmp_path, tokenizer, QWEN, str(tmp_path / "rows.parquet"))
    [expected] = read(tmp_path, tokenizer, QWEN, rows[:1])
    assert (first.ids, first.loss_mask) == (expected.ids, expected.loss_mask)
    [text] = trained(tokenizer, second)
    assert '{"name": "sum", "arguments": {"terms": [1, 2]}}' in text
    assert "null" not in tokenizer.decode(list(second.ids))


@pytest.mark.parametrize(
    ("row", "template", "message"),
    [
        ({"tools": "weather"}, QWEN, "tools is 'weather', expected a list of tool schemas"),
        ({"tools": [1]}, QWEN, "tools is .1., expected a list of tool schemas"),
        ({"enable_thinking": "no"}, QWEN, "enable_thinking is 'no', expected true or false"),
        ({"tools": [TOOL]}, THINKING, "does not write the tool 'sum'"),
        (
            {},
            "{% for m in messages %}{{ m.role }} {{ m.content }}\n{% endfor %}"
            "{% if add_generation_prompt %}assistant {% endif %}",
            "does not write the call of 'weather' in turn 1",
        ),
        (
            {
                "messages": [
                    {"role": "user", "content": "x"},
                    {"role": "assistant", "content": None, "tool_calls": [{"type": "f"}]},
                ]
            },
            QWEN,
            "tool_calls is .*expected a list like",
        ),
    ],
)
def test_what_cannot_be_rendered(tmp_path, tokenizer, row, template, message):
    row = {"messages": chat(), **row}
    if "does not write the tool" in message:
        row["tools"] = [{"type": "function", "function": {"name": "sum"}}]
    with pytest.raises(DataError, match=message):
        read(tmp_path, tokenizer, template, [row])
