"""One format of rows for SFT and RL: tools, calls, loss flags, and what a template leaves out."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hybridengine.run.config import DataConfig, SFTDataConfig
from hybridengine.train.data import DataError, PromptDataset, SFTDataset
from hybridengine.train.data.chats import ChatTemplate
from hybridengine.train.data.conversations import check_conversations
from tests.extras.agents.families import CHATML, byte_tokenizer
from tests.train.data.rows import write_jsonl
from tests.train.data.tool_chats import QWEN, THINKING, TOOL, chat, trained

# Writes the arguments of a call as they are, as DeepSeek's: it takes them as JSON text only.
TEXT_ARGUMENTS = QWEN.replace("call.function.arguments | tojson", "'' + call.function.arguments")
OTHER = {"type": "function", "function": {"name": "sum", "parameters": {"default": None}}}


def rl_row(messages, **columns):
    return {
        "data_source": "d",
        "prompt": messages,
        "reward_model": {"ground_truth": "1"},
        **columns,
    }


def prompts(tmp_path, rows, template=QWEN, tools=(), **settings):
    files = rows if isinstance(rows, str) else write_jsonl(tmp_path / "rl.jsonl", rows)
    data = DataConfig(chat_template=template, max_prompt_length=4096, **settings)
    return PromptDataset(files, byte_tokenizer(), data, tools)


def conversations(tmp_path, rows, template=QWEN, **settings):
    files = rows if isinstance(rows, str) else write_jsonl(tmp_path / "sft.jsonl", rows)
    settings = {"messages_key": "messages", "max_length": 4096, **settings}
    data = SFTDataConfig(train_files=files, chat_template=template, **settings)
    return SFTDataset(files, byte_tokenizer(), data)


@pytest.mark.parametrize("template", [QWEN, TEXT_ARGUMENTS])
@pytest.mark.parametrize("as_text", [False, True])
def test_calls_and_tools_of_a_prompt_are_those_of_a_conversation(tmp_path, template, as_text):
    """In parquet, whose nulls are removed, and in JSON; with arguments in either form."""
    messages = chat(as_text=as_text)[:5]
    other = [{"role": "user", "content": "1 + 2"}]
    if not as_text:  # a struct column with other arguments: Oslo's call gets `terms: null`
        own = {"name": "sum", "arguments": {"terms": [1, 2]}}
        other += [
            {"role": "assistant", "content": None, "tool_calls": [{"function": own}]},
            {"role": "tool", "content": "3", "name": "sum"},
        ]
    rows = [rl_row(messages, tools=[TOOL, OTHER]), rl_row(other, tools=[OTHER])]
    full = [*messages, {"role": "assistant", "content": "Rome."}]
    [sft] = conversations(tmp_path, [{"messages": full, "tools": [TOOL, OTHER]}], template)
    expected = byte_tokenizer().decode(list(sft.ids)).rsplit("Rome.<", 1)[0]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rl.parquet")
    for source in (rows, str(tmp_path / "rl.parquet")):
        first, second = prompts(tmp_path, source, template)
        text = expected
        if source is not rows:  # Arrow cannot tell this null from one that it filled
            text = expected.replace('{"default": null}', "{}")
        assert first.prompt_text == text
        assert '"arguments": {"city": "Oslo"}}' in text and "The weather of a city." in text
        assert '\\"' not in text and "terms" not in text
        calls = [m["tool_calls"][0]["function"]["arguments"] for m in first.chat[1:4:2]]
        assert calls == [{"city": "Oslo"}, {"city": "Rome"}]
        assert [tool["function"]["name"] for tool in second.tools] == ["sum"]


def test_tools_and_variables_of_a_row_in_rl(tmp_path):
    question = [{"role": "user", "content": "hi"}]
    own = rl_row(question, tools=json.dumps([OTHER]), enable_thinking=False)
    first, second = prompts(tmp_path, [own, rl_row(question)], THINKING + "{{ tools | tojson }}")
    assert '"sum"' in first.prompt_text and "</think>" in first.prompt_text
    assert (first.template_options, second.template_options) == ({"enable_thinking": False}, {})
    assert "</think>" not in second.prompt_text and second.prompt_text.endswith("null")
    # With tools of the run a row selects some of them.
    run = [TOOL, OTHER]
    first, second = prompts(tmp_path, [own, rl_row(question)], QWEN, run)
    assert "weather" not in first.prompt_text and "weather" in second.prompt_text
    with pytest.raises(DataError, match="the row has the tool 'sum', and the tools of the run are"):
        prompts(tmp_path, [own], QWEN, [TOOL])
    with pytest.raises(DataError, match="line 1: the chat template does not write the tool 'sum'"):
        prompts(tmp_path, [own], CHATML)


def test_a_turn_with_a_call_and_no_content(tmp_path):
    messages = chat()[:3]
    del messages[1]["content"]
    assert '"Oslo"' in prompts(tmp_path, [rl_row(messages)])[0].prompt_text
    [sample] = conversations(tmp_path, [{"messages": messages[:2]}])
    assert trained(byte_tokenizer(), sample)[0].startswith("<tool_call>")


def test_sharegpt_with_calls_and_flags(tmp_path):
    turns = [
        {"from": "human", "value": "Oslo?"},
        {"from": "function_call", "value": '{"name": "weather", "arguments": {"city": "Oslo"}}'},
        {"from": "observation", "value": "snow"},
        {"from": "gpt", "value": "Snow.", "weight": 0},
    ]
    [sample] = conversations(tmp_path, [{"messages": turns, "tools": [TOOL]}])
    [text] = trained(byte_tokenizer(), sample)
    assert text.startswith("<tool_call>") and '{"city": "Oslo"}' in text and "Snow" not in text
    turns[1]["value"] = "no call"
    with pytest.raises(DataError, match="tool_calls is 'no call', expected a list like"):
        conversations(tmp_path, [{"messages": turns, "tools": [TOOL]}])


@pytest.mark.parametrize("flag", ["weight", "loss_mask", "trainable", "train", "loss"])
@pytest.mark.parametrize("off", [0, False, 0.0])
def test_flags_of_turns_are_honoured(tmp_path, flag, off):
    messages = [
        {"role": "user", "content": "a", flag: off},
        {"role": "assistant", "content": "b", flag: off},
        {"role": "user", "content": "c"},
        {"role": "assistant", "content": "d", flag: 1},
        {"role": "user", "content": "e"},
        {"role": "assistant", "content": "f", flag: None},
    ]
    [sample] = conversations(tmp_path, [{"messages": messages}], CHATML)
    assert trained(byte_tokenizer(), sample) == ["d<|im_end|>", "f<|im_end|>"]
    assert len(prompts(tmp_path, [rl_row(messages[:3])], CHATML)) == 1


@pytest.mark.parametrize(
    ("turn", "message"),
    [
        ({"weight": 0.5}, "line 1, turn 1: weight is 0.5, expected 0, 1, false or true"),
        ({"trainable": "no"}, "turn 1: trainable is 'no', expected 0, 1"),
        ({"weight": 1, "loss_mask": 0}, "turn 1: weight and loss_mask contradict each other"),
        ({"weight": 0}, "line 1: no turn has the role assistant and is to be trained on"),
        ({"role": "user", "train": True}, "train asks to train on a turn of the role 'user'"),
    ],
)
def test_flags_that_cannot_be_honoured(tmp_path, turn, message):
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", **turn}]
    with pytest.raises(DataError, match=message):
        conversations(tmp_path, [{"messages": messages}], CHATML)


@pytest.mark.parametrize(
    "key", ["reasoning", "thinking", "reasoning_content", "function_call", "thought"]
)
def test_what_a_template_does_not_read_is_refused(tmp_path, key):
    messages = [
        {"role": "user", "content": "a"},
        {
            "role": "assistant",
            "content": "b",
            key: "hm" if key != "function_call" else {"name": "f"},
        },
    ]
    message = f"line 1: turn 1 has '{key}', which the chat template does not read"
    with pytest.raises(DataError, match=f"{message}.*write it into the content"):
        conversations(tmp_path, [{"messages": messages}], CHATML)
    with pytest.raises(DataError, match=message):
        prompts(tmp_path, [rl_row([*messages, messages[0]])], CHATML)
    if key in ("reasoning", "thinking"):  # as well as under the key that is read
        both = [messages[0], {**messages[1], "reasoning_content": "hm"}]
        [sample] = conversations(tmp_path, [{"messages": both}], THINKING)
        assert trained(byte_tokenizer(), sample)[0].count("hm") == 1
    if key == "reasoning_content":
        [sample] = conversations(tmp_path, [{"messages": messages}], THINKING)
        assert "hm" in trained(byte_tokenizer(), sample)[0]
    else:
        with pytest.raises(DataError, match=f"{message}.*rename it to reasoning_content"):
            conversations(tmp_path, [{"messages": messages}], THINKING)


def test_keys_of_a_data_set_are_left_alone(tmp_path):
    turn = {"role": "user", "content": "a", "language": "English", "timestamp": "2026", "id": "7"}
    rows = [{"messages": [turn, {"role": "assistant", "content": "b", "language": "English"}]}]
    [sample] = conversations(tmp_path, rows, CHATML)
    assert "English" not in trained(byte_tokenizer(), sample)[0]


def test_a_key_that_is_the_name_of_a_variable_is_not_read(tmp_path):
    template = CHATML + "{{ 'think' if (thinking is defined and thinking) }}"
    turn = {"role": "assistant", "content": "b", "thinking": "hm"}
    row = rl_row([{"role": "user", "content": "a"}, turn, {"role": "user", "content": "c"}])
    with pytest.raises(DataError, match="turn 1 has 'thinking', which the chat template does not"):
        prompts(tmp_path, [row], template)


def test_keys_that_a_template_writes_without_their_names(tmp_path):
    """As one that writes whole messages, or takes the name from a variable."""
    turn = {"role": "user", "content": "a", "mood": "glad", "message_id": "1", "rank": 2}
    for content in ("m|tojson", "m.content ~ m[key]"):
        template = "{% set key = 'mood' %}" + CHATML.replace("m.content", content)
        [prompt] = prompts(tmp_path, [rl_row([turn])], template)
        assert "glad" in prompt.prompt_text


@pytest.mark.parametrize("system", ["请简短回答", "yes", "!", "user"])
def test_a_dropped_text_is_refused_whatever_it_is(tmp_path, system):
    messages = [{"role": "system", "content": system}, {"role": "user", "content": "say yes"}]
    template = CHATML.replace("in messages", "in messages if m.role != 'system'")
    assert len(prompts(tmp_path, [rl_row(messages)], CHATML)) == 1
    with pytest.raises(DataError, match="line 1: the chat template leaves out turn 0, of the "):
        prompts(tmp_path, [rl_row(messages)], template)


def test_parts_that_a_template_writes_as_objects():
    chat = [{"role": "user", "content": [{"type": "text", "text": "hello"}, {"type": "image"}]}]
    joined = CHATML.replace("m.content", "m.content|map(attribute='text')|join")
    for template, dropped in ((CHATML, 0), (joined, None)):
        data = DataConfig(chat_template=template)
        assert ChatTemplate(byte_tokenizer(), data).left_out("row", chat, True) == dropped


@pytest.mark.parametrize(
    ("content", "is_written"),
    [
        ("m.content|trim", True),
        ("m.content|tojson", True),
        ("m.content|tojson(ensure_ascii=True)", True),
        ("m.content|urlencode", True),
        ("m.content|upper", True),
        ("m.content[:100]", True),
        ("m.content[:3]", False),
        ("m.content[3:]", False),
        ("m.content.split('/')[-1]", False),
        ("m.content.split('/')[0]", False),
        ("m.content|length", False),
    ],
)
def test_contents_that_a_template_changes(tmp_path, content, is_written):
    template = CHATML.replace("m.content", content)
    row = rl_row([{"role": "user", "content": " 一 b/c\n"}])
    if is_written:
        assert len(prompts(tmp_path, [row], template)) == 1
    else:
        with pytest.raises(DataError, match="leaves out turn 0, of the role 'user', or a part"):
            prompts(tmp_path, [row], template)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"name": "f", "arguments": {"a": 1, "a": 2}}', "has the key 'a' twice"),
        ('{"name": "f", "arguments": ' + "[" * 101 + "]" * 101 + "}", "more than 100 nested"),
    ],
)
def test_json_text_inside_a_row_is_read_strictly(tmp_path, text, message):
    ask, answer = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
    arguments = text.partition('arguments": ')[2][:-1]
    call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
    for rows in (
        {"messages": [ask, answer], "tools": text},
        {"messages": [ask, {**answer, "tool_calls": [call]}]},
        {"messages": [{"from": "human", "value": "a"}, {"from": "function_call", "value": text}]},
    ):
        with pytest.raises(DataError, match=f"line 1: tool.* {message}"):
            conversations(tmp_path, [rows])


def test_a_turn_that_a_template_leaves_out_is_refused(tmp_path):
    template = CHATML.replace(
        "{% for m in messages %}", "{% for m in messages if m.role != 'system' %}"
    )
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "a"}]
    for read, rows in (
        (prompts, [rl_row(messages)]),
        (conversations, [{"messages": [*messages, {"role": "assistant", "content": "b"}]}]),
    ):
        assert len(read(tmp_path, rows, CHATML)) == 1
        with pytest.raises(DataError, match="line 1: the chat template leaves out turn 0, of the "):
            read(tmp_path, rows, template)
    answered = [messages[1], {"role": "assistant", "content": "b"}, messages[1]]
    only_users = CHATML.replace("in messages", "in messages if m.role != 'assistant'")
    with pytest.raises(DataError, match="leaves out turn 1, of the role 'assistant'"):
        prompts(tmp_path, [rl_row(answered)], only_users)
    called = [messages[1], chat()[1], {"role": "tool", "content": "snow"}]
    with pytest.raises(DataError, match=r"line 1: .* not write the call of 'weather' in turn 1"):
        prompts(tmp_path, [rl_row(called)], CHATML)
    cut = CHATML.replace("m.content", "m.content[:3] if m.role == 'assistant' else m.content")
    with pytest.raises(DataError, match="leaves out turn 1, of the role 'assistant', or a part of"):
        conversations(
            tmp_path, [{"messages": [messages[1], {"role": "assistant", "content": "long"}]}], cut
        )


def test_prompts_of_rl_that_are_refused(tmp_path):
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    with pytest.raises(DataError, match="line 1: prompt ends with a turn of the assistant"):
        prompts(tmp_path, [rl_row(messages)], CHATML)
    with pytest.raises(DataError, match="line 1: data_source is None, expected text"):
        prompts(tmp_path, [rl_row(messages[:1], data_source=None)], CHATML)


def test_long_conversations_are_dropped_and_counted(tmp_path):
    rows = [{"prompt": "a", "response": "b" * n} for n in (1, 200, 2)]
    settings = {"messages_key": None, "max_length": 100}
    with pytest.raises(DataError, match=r"line 2: .* 100; .*data\.filter_overlong_prompts=true"):
        conversations(tmp_path, rows, CHATML, **settings)
    for _ in range(2):  # made, then from the cache
        data = conversations(tmp_path, rows, CHATML, filter_overlong_prompts=True, **settings)
        assert (len(data), data.dropped) == (2, 1)
        assert trained(byte_tokenizer(), data[1]) == ["bb<|im_end|>"]
    with pytest.raises(DataError, match=r"all 1 conversations of .* longer than data\.max_length"):
        conversations(tmp_path, rows[1:2], CHATML, filter_overlong_prompts=True, **settings)


def test_a_chat_without_its_key(tmp_path):
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    file = write_jsonl(tmp_path / "a.jsonl", [{"id": 1, "chat": messages}])
    with pytest.raises(DataError, match=r"line 1 has no columns .* set data\.messages_key=chat"):
        check_conversations(file, SFTDataConfig(train_files=file))
