"""Chats in every shape, and templates that fail or loop."""

import os
import resource
import time
from datetime import datetime
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch.distributed as dist

from hybridengine.run.config import DataConfig, SFTDataConfig
from hybridengine.run.rank import agree_on_run_start, run_start
from hybridengine.train.data import DataError, PromptDataset, chats
from hybridengine.train.data.chats import ChatTemplate
from hybridengine.train.data.conversations import SFTDataset
from hybridengine.train.data.files import RowLocation, read_files
from hybridengine.train.data.rows import read_chat
from tests.train.data.rows import TEMPLATE, row, write_jsonl


def chat(value):
    where = RowLocation(Path("rows.jsonl"), "line 1")
    return read_chat(where, {}, "c", value, DataConfig()).messages


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
    plain = [{"type": "function", "function": {"name": "f", "arguments": {}}}]
    assert (
        chat(parsed["c"]) == chat(given) == [given[0], given[1] | {"tool_calls": plain}, given[2]]
    )


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
        patch.setattr(chats, "RENDER_TIMEOUT_S", 0.2)
        with pytest.raises(DataError, match=r"TimeoutError: no text within 0\.2 s; does it loop"):
            render(tokenizer, loop)
    with pytest.raises(DataError, match="got multiple values for keyword argument 'tokenize'"):
        render(tokenizer, "{{ 1 }}", tokenize=True)


@pytest.mark.parametrize(
    "expression",
    [
        "'a' * 10**10",
        "'a'.ljust(10**10)",
        "'%10000000000s' % 'a'",
        "'a'|center(10**10)",
        "[0] * 10**10",
        "('a' * 10**5).replace('', 'b' * 10**5)",
        "{% set n = namespace(t='a') %}{% for i in range(40) %}{% set n.t = n.t ~ n.t %}"
        "{% endfor %}",
    ],
)
def test_a_template_that_takes_too_much_memory_is_stopped(tokenizer, monkeypatch, expression):
    monkeypatch.setattr(chats, "RENDER_TIMEOUT_S", 300.0)  # a busy machine is slow
    before = resource.getrlimit(resource.RLIMIT_AS)
    template = f"{{{{ ({expression})|length }}}}" if "{%" not in expression else expression
    with pytest.raises(DataError, match="takes more than 512 MiB of memory"):
        render(tokenizer, template)
    assert resource.getrlimit(resource.RLIMIT_AS) == before


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


DATED = "{{ strftime_now('%d %B %Y') }} {% for m in messages %}{{ m.content }}{% endfor %}"


def test_a_run_renders_with_the_date_at_which_it_started(tokenizer, tmp_path, monkeypatch):
    """Prompts are not read from the cache of another day; trajectories have the date of prompts."""
    monkeypatch.setenv("HYBRIDENGINE_CACHE", str(tmp_path / "cache"))
    file = write_jsonl(tmp_path / "a.jsonl", [row("1")])
    computed = DATED.replace("'%d %B %Y'", "'%d ' ~ '%B %Y'")
    for template in (DATED, computed):
        data, sft = DataConfig(chat_template=template), SFTDataConfig(chat_template=template)
        for day in (1, 2):
            monkeypatch.setenv("HYBRIDENGINE_RUN_START", f"2026-03-0{day}T23:59:59")
            text = f"0{day} March 2026 1"
            [prompt] = PromptDataset(file, tokenizer, data)
            assert prompt.prompt_text == text
            pair = write_jsonl(tmp_path / "b.jsonl", [{"prompt": "1", "response": "2"}])
            [sample] = SFTDataset(pair, tokenizer, sft)
            assert list(sample.ids[:1]) == tokenizer(f"0{day}").input_ids
            assert ChatTemplate(tokenizer, data).render("a trajectory", prompt.chat, True) == text
    same_day, other_hour = "2026-03-02T01:00:00", "2026-03-02T02:00:00"
    keys = []
    asks = "{% if strftime_now is defined %}" + DATED + "{% endif %}"
    for template in (asks, TEMPLATE):
        for start in (same_day, other_hour):
            monkeypatch.setenv("HYBRIDENGINE_RUN_START", start)
            keys.append(ChatTemplate(tokenizer, DataConfig(chat_template=template)).inputs)
    assert keys[0] == keys[1] and keys[2] == keys[3] and keys[0] != keys[2]


def test_the_date_of_a_run_is_that_of_its_first_process(monkeypatch):
    monkeypatch.delenv("HYBRIDENGINE_RUN_START", raising=False)
    start = run_start()
    assert datetime.fromisoformat(os.environ["HYBRIDENGINE_RUN_START"]) == start == run_start()
    monkeypatch.setenv("HYBRIDENGINE_SECRET", "x" * 64)
    store = dist.HashStore()
    for other in (start, datetime(2031, 1, 1), datetime(2032, 1, 1)):  # ranks of several machines
        monkeypatch.setenv("HYBRIDENGINE_RUN_START", other.isoformat())
        agree_on_run_start(store)
        assert run_start() == start
