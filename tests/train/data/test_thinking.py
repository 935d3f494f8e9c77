"""SFT with the templates of thinking models: which text of a turn is trained on, what is refused.

Templates are those that TRL ships.
"""

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from hybridengine.run.config import DataConfig, SFTDataConfig
from hybridengine.train.data import DataError, SFTDataset
from hybridengine.train.data.chats import ChatTemplate
from hybridengine.train.data.conversations import find_spans
from hybridengine.train.data.rows import RowChat
from tests.extras.agents.families import byte_tokenizer
from tests.train.data.rows import write_jsonl
from tests.train.data.tool_chats import trained

SPEC = importlib.util.find_spec("trl")
pytestmark = pytest.mark.skipif(SPEC is None, reason="needs TRL")


def template_of(name: str) -> str:
    assert SPEC is not None and SPEC.origin is not None
    return str(Path(SPEC.origin).parent / "chat_templates" / f"{name}.jinja")


def spans(name: str, chat: list[dict[str, Any]], **options: Any) -> list[str]:
    data = DataConfig(chat_template=template_of(name), apply_chat_template_kwargs=options)
    row = RowChat("row", chat, [], [], {}, [None] * len(chat))  # type: ignore[arg-type]
    own, shown, text = ChatTemplate(byte_tokenizer(), data).show(row, False)
    turns = [turn for turn, message in enumerate(chat) if message["role"] == "assistant"]
    return [text[slice(*span)].strip() for span in find_spans("row", own, shown, text, turns)]


def plain(*thoughts: str) -> list[dict[str, Any]]:
    chat = []
    for turn, content in enumerate(("One.", "<b>Two.")):
        chat.append({"role": "user", "content": f"question {turn}"})
        chat.append({"role": "assistant", "content": content})
        if turn < len(thoughts) and thoughts[turn]:
            chat[-1]["reasoning_content"] = thoughts[turn]
    return chat


def with_calls() -> list[dict[str, Any]]:
    chat = [{"role": "user", "content": "go"}]
    for k in range(2):
        call = {"id": f"call0000{k}", "type": "function"}
        call["function"] = {"name": "add", "arguments": {"a": k}}
        chat.append({"role": "assistant", "content": "", "tool_calls": [call]})
        chat.append({"role": "tool", "name": "add", "tool_call_id": call["id"], "content": "0"})
    chat.append({"role": "assistant", "content": "Done."})
    return [*chat, {"role": "user", "content": "thanks"}, {"role": "assistant", "content": "Bye."}]


END = "<|im_end|>"
EOS = "<\uff5cend\u2581of\u2581sentence\uff5c>"
# Two plain turns as each template writes them: an empty thought is in the last turn, in all turns,
# in none, or partly in the generation prompt, which is not trained on.
PLAIN = {
    "qwen3": [f"One.{END}", f"<think>\n\n</think>\n\n<b>Two.{END}"],
    "qwen3_5_think": [f"One.{END}", f"</think>\n\n<b>Two.{END}"],
    "qwen3_5_nothink": [f"One.{END}", f"<b>Two.{END}"],
    "qwen3_6": [f"One.{END}", f"</think>\n\n<b>Two.{END}"],
    "qwen3_8": [f"</think>\n\nOne.{END}", f"</think>\n\n<b>Two.{END}"],
    "nemotron_3_nano": [f"</think>One.{END}", f"</think><b>Two.{END}"],
    "deepseekv3": [f"One.{EOS}", f"<b>Two.{EOS}"],
    "deepseek_r1_distill": [f"One.{EOS}", f"<b>Two.{EOS}"],
    "glm4moe": ["<think></think>\nOne.", "<think></think>\n<b>Two."],
    "lfm2_2_5_v2": [f"One.{END}", f"<b>Two.{END}"],
    "phi3": ["One.<|end|>", "<b>Two.<|end|>\n</s>"],
}

SWITCHED = ("qwen3", "qwen3_5_think", "qwen3_6", "qwen3_8", "nemotron_3_nano")


@pytest.mark.parametrize("name", PLAIN)
def test_two_plain_turns(name):
    assert spans(name, plain()) == PLAIN[name]


@pytest.mark.parametrize("name", SWITCHED)
def test_two_plain_turns_without_thinking(name):
    """The generation prompt has the empty thought."""
    assert spans(name, plain(), enable_thinking=False) == [f"One.{END}", f"<b>Two.{END}"]


@pytest.mark.parametrize("name", SWITCHED)
@pytest.mark.parametrize("thinking", [True, False])
def test_turns_with_calls(name, thinking):
    first, second, third, last = spans(name, with_calls(), enable_thinking=thinking)
    for text, number in ((first, 0), (second, 1)):
        assert text.split("</think>")[-1].lstrip().startswith("<tool_call>")
        assert "add" in text and str(number) in text and text.endswith(END)
    assert third.endswith(f"Done.{END}") and last.endswith(f"Bye.{END}")
    assert "user" not in "".join((first, second, third, last))
    assert thinking or "think" not in "".join((first, second, third, last))


@pytest.mark.parametrize(
    ("name", "last"),
    [
        ("qwen3", f"<think>\nhm\n</think>\n\n<b>Two.{END}"),
        ("qwen3_5_think", f"hm\n</think>\n\n<b>Two.{END}"),
        ("qwen3_8", f"hm\n</think>\n\n<b>Two.{END}"),
        ("nemotron_3_nano", f"hm\n</think>\n<b>Two.{END}"),
        ("glm4moe", "<think>hm</think>\n<b>Two."),
    ],
)
def test_a_thought_of_the_last_turn(name, last):
    assert spans(name, plain("", "hm"))[1] == last


@pytest.mark.parametrize(
    ("name", "options", "chat", "message"),
    [
        ("qwen3", {}, plain("a", "b"), "changes turn 1 .* located; give one row per"),
        ("qwen3_6", {}, plain("a", "b"), r"set data\..*kwargs\.preserve_thinking=true"),
        ("nemotron_3_nano", {}, plain("a", "b"), "set .*truncate_history_thinking=false"),
        (
            "qwen3_5_think",
            {"enable_thinking": False},
            plain("", "b"),
            r"set data\.apply_chat_template_kwargs\.enable_thinking=true, give one row",
        ),
        ("deepseekv3", {}, plain("", "b"), "turn 3 has 'reasoning_content', which .* not read"),
        ("qwen2_5", {}, plain("", "b"), "turn 3 has 'reasoning_content', which .* not read"),
    ],
)
def test_a_thought_that_is_not_written(name, options, chat, message):
    with pytest.raises(DataError, match=f"row: .*{message}"):
        spans(name, chat, **options)
    if "preserve" in message or "truncate" in message or "enable_thinking=true" in message:
        key, value = message.rsplit("=", 1)
        name_of = key.split(".")[-1].strip("*\\")
        fixed = {**options, name_of: value.startswith("true")}
        assert all("</think>" in text for text in spans(name, chat, **fixed)[-1:])


def test_a_thought_inside_a_content_that_a_template_drops():
    chat = plain()
    chat[3]["content"] = "<think>hm</think>Two."
    with pytest.raises(DataError, match="does not write the content in turn 3"):
        spans("deepseekv3", chat)
    assert spans("qwen3", chat)[1] == f"<think>\nhm\n</think>\n\nTwo.{END}"


GLM_STOPS = ["</s>", "<|user|>", "<|observation|>"]  # eos_token_id of the generation config


@pytest.mark.parametrize("num_turns", [2, 3, 6, 8])
def test_the_role_of_the_next_turn_ends_a_turn(tmp_path, monkeypatch, num_turns):
    """GLM: generation stops at it, so it is trained on, also where no next turn is there."""
    monkeypatch.setenv("HYBRIDENGINE_CACHE", str(tmp_path / "cache"))
    tokenizer = byte_tokenizer()
    messages = with_calls()[:num_turns]
    file = write_jsonl(tmp_path / "a.jsonl", [{"messages": messages}])
    data = SFTDataConfig(
        train_files=file,
        messages_key="messages",
        chat_template=template_of("glm4moe"),
        max_length=4096,
    )
    stops = tokenizer.convert_tokens_to_ids(GLM_STOPS)
    [sample] = SFTDataset(file, tokenizer, data, None, stops)
    expected = ["<|observation|>", "<|observation|>", "<|user|>", "<|user|>"]
    texts = [text for text in trained(tokenizer, sample)]
    assert [text[text.rindex("<|") :] for text in texts] == expected[: len(texts)]
    assert len(texts) == sum(message["role"] == "assistant" for message in messages)
    assert not any(text.endswith(tuple(GLM_STOPS)) for text in (t[:-1] for t in texts))
    full = tokenizer.apply_chat_template(
        messages, chat_template=Path(template_of("glm4moe")).read_text(), tokenize=False
    )
    ends_with_turn = messages[-1]["role"] == "assistant"
    added = expected[len(texts) - 1] if ends_with_turn else ""
    assert tokenizer.decode(list(sample.ids)) == full + added


def test_without_a_stop_token_that_follows_eos_ends_the_chat(tmp_path, monkeypatch):
    monkeypatch.setenv("HYBRIDENGINE_CACHE", str(tmp_path / "cache"))
    tokenizer = byte_tokenizer()
    file = write_jsonl(tmp_path / "a.jsonl", [{"messages": plain()}])
    for name, ends in (("glm4moe", ["One.", "Two.</s>"]), ("phi3", ["One.<|end|>"] * 2)):
        data = SFTDataConfig(
            train_files=file, messages_key="messages", chat_template=template_of(name)
        )
        stops = tokenizer.convert_tokens_to_ids(["</s>"] if name == "glm4moe" else ["<|end|>"])
        [sample] = SFTDataset(file, tokenizer, data, None, stops)
        found = [
            text[-len(end) :] for text, end in zip(trained(tokenizer, sample), ends, strict=True)
        ]
        assert found == [ends[0], ends[1].replace("One", "Two")]
