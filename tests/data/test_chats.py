"""Chats in every shape, and templates that fail or loop."""

import time

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hybridengine.config import DataConfig, SFTDataConfig
from hybridengine.data import DataError, PromptDataset, chats
from hybridengine.data.chats import ChatTemplate
from hybridengine.data.conversations import SFTDataset
from hybridengine.data.files import read_files
from hybridengine.data.rows import parse_chat
from tests.data.rows import row, write_jsonl


def chat(value):
    return parse_chat("here", "c", value)


def test_sharegpt_is_a_chat():
    turns = [("system", "s"), ("human", "1"), ("gpt", "2"), ("observation", "3"), ("critic", "4")]
    given = [{"from": speaker, "value": text, "weight": None} for speaker, text in turns]
    roles = ["system", "user", "assistant", "tool", "critic"]
    assert chat(given) == [
        {"role": role, "content": text} for role, (_, text) in zip(roles, turns, strict=True)
    ]


def test_sharegpt_in_files(tokenizer, tmp_path):
    turns = [{"from": "human", "value": "1 2"}, {"from": "gpt", "value": "3"}]
    file = write_jsonl(tmp_path / "a.jsonl", [{"conversations": turns}])
    data = SFTDataConfig(train_files=file, messages_key="conversations")
    [sample] = SFTDataset(file, tokenizer, data)
    assert tokenizer.decode(list(sample.ids)) == "user 1 2 assistant 3"
    file = write_jsonl(tmp_path / "b.jsonl", [row(conversations=turns[:1])])
    [prompt] = PromptDataset(file, tokenizer, DataConfig(prompt_key="conversations"))
    assert prompt.prompt_text == "user 1 2 assistant"


def test_nulls_of_parquet_are_dropped(tmp_path):
    """A column of structs has all keys in every message."""
    calls = [{"name": "f", "arguments": "{}"}]
    given = [
        {"role": "user", "content": "1"},
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "tool", "content": "2", "name": "f"},
    ]
    pq.write_table(pa.Table.from_pylist([{"c": given}]), tmp_path / "a.parquet")
    [(_, parsed)] = read_files(str(tmp_path / "a.parquet"))
    assert chat(parsed["c"]) == chat(given) == given


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("text", "c is 'text', expected a chat, .*; it is no list of messages"),
        ({}, "it is no list"),
        ([], "it is no list"),
        (None, "c is None"),
        (["text"], "turn 0: it is 'text'"),
        ([{"role": "user", "content": "1"}, {"content": "2"}], "turn 1: role is None"),
        ([{"role": 1, "content": "2"}], "turn 0: role is 1"),
        ([{"role": "", "content": "2"}], "turn 0: role is ''"),
        ([{"role": "user"}], "turn 0: content is None, not text"),
        ([{"role": "user", "content": None}], "turn 0: content is None, not text"),
        ([{"role": "user", "content": 3}], "turn 0: content is 3, not text"),
        ([{"from": "human", "text": "1"}], "turn 0: content is None"),
        ([{"from": 3, "value": "1"}], "turn 0: role is 3"),
    ],
)
def test_values_that_are_not_chats(value, message):
    with pytest.raises(DataError, match=message):
        chat(value)


def render(tokenizer, template, **options):
    data = DataConfig(chat_template=template, apply_chat_template_kwargs=options)
    return ChatTemplate(tokenizer, data).render("here", [{"role": "user", "content": "1"}], True)


def test_options_reach_the_template(tokenizer):
    template = "{% if enable_thinking is defined %}{{ enable_thinking }}{% else %}unset{% endif %}"
    assert render(tokenizer, template) == "unset"
    assert render(tokenizer, template, enable_thinking=False) == "False"


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{% for i in range(10**9) %}x{% endfor %}", "OverflowError: Range too big"),
        ("{{ messages[3].content }}", "refuses this chat: .*no element 3"),
        ("{{ 1 / 0 }}", "ZeroDivisionError: division by zero"),
        ("{{ messages[0].content + 1 }}", "TypeError: can only concatenate"),
        ("{{ '\\ud83d' }}", "UnicodeEncodeError: .* surrogates not allowed"),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "RecursionError"),
        ("{% if %}", "refuses this chat: "),
        ("{{ messages[0].content.__class__.__mro__ }}", "refuses this chat: .*unsafe"),
    ],
)
def test_templates_that_fail(tokenizer, template, message):
    with pytest.raises(DataError, match=f"here: the chat template .*{message}") as error:
        render(tokenizer, template)
    assert len(str(error.value)) < 400


def test_a_template_that_loops_is_stopped(tokenizer, monkeypatch):
    loop = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    with monkeypatch.context() as patch:
        patch.setattr(chats, "_RENDER_TIMEOUT_S", 0.2)
        with pytest.raises(DataError, match=r"TimeoutError: no text within 0\.2 s; does it loop"):
            render(tokenizer, loop)
    with pytest.raises(DataError, match="got multiple values for keyword argument 'tokenize'"):
        render(tokenizer, "{{ 1 }}", tokenize=True)


def test_an_alarm_of_the_caller_still_fires(tokenizer):
    import signal

    fired = []
    before = signal.signal(signal.SIGALRM, lambda *_: fired.append(time.monotonic()))
    outer = signal.setitimer(signal.ITIMER_REAL, 0.3)
    try:
        assert render(tokenizer, "{{ 1 }}") == "1"
        deadline = time.monotonic() + 30
        while not fired and time.monotonic() < deadline:
            time.sleep(0.01)
        assert fired
    finally:
        signal.signal(signal.SIGALRM, before)
        signal.setitimer(signal.ITIMER_REAL, *outer)


def test_template_files_and_named_templates(tokenizer, tmp_path, monkeypatch):
    (tmp_path / "bad.jinja").write_bytes(b"\xff{{ 1 }}")
    with pytest.raises(DataError, match=r"bad\.jinja' cannot be read: 'utf-8' codec"):
        render(tokenizer, str(tmp_path / "bad.jinja"))
    (tmp_path / "bom.jinja").write_bytes(b"\xef\xbb\xbf{{ 1 }}")
    assert render(tokenizer, str(tmp_path / "bom.jinja")) == "1"
    monkeypatch.setattr(tokenizer, "chat_template", {"default": "d", "tool_use": "t"})
    assert render(tokenizer, None) == "d"
    monkeypatch.setattr(tokenizer, "chat_template", {"rag": "r", "tool_use": "t"})
    with pytest.raises(DataError, match="chat templates rag, tool_use and none is called default"):
        render(tokenizer, None)
