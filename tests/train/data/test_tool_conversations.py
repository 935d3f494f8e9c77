"""Conversations with tools: what is trained on under templates in the style of four families.

The tokenizer has one token per byte, so that the trained tokens read as text.
"""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from hybridengine.run.config import SFTDataConfig
from hybridengine.train.data import DataError
from hybridengine.train.data.conversations import SFTDataset
from tests.train.data.rows import write_jsonl
from tests.train.data.tool_chats import HERMES, LLAMA, QWEN, THINKING, TOOL, call, chat, trained

SPECIAL = ["<|im_start|>", "<|im_end|>", "<|eot|>", "<|header|>", "<|/header|>", "<|python_tag|>"]


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
    messages = chat()
    rows = [{"messages": messages, "tools": [TOOL]}]
    with pytest.raises(DataError, match="leaves out turn 3, of the role 'assistant', or a"):
        read(tmp_path, tokenizer, LLAMA, rows)  # a turn with both
    messages[3]["content"] = ""
    [sample] = read(tmp_path, tokenizer, LLAMA, rows)
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
        ({"tools": [{"type": "function"}]}, QWEN, "tools is .*expected a list of tool schemas"),
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
