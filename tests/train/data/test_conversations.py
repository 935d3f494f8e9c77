"""The loss mask of conversations: golden ids for shift, turns and EOS."""

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from hybridengine.run.config import SFTDataConfig
from hybridengine.train.data import DataError
from hybridengine.train.data.conversations import SFTDataset
from tests.train.data.rows import write_jsonl

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
PLAIN = (
    "{% for m in messages %}{% if m.role == 'user' %}Q {{ m.content }} A {% else %}"
    "{{ m.content }} {% endif %}{% endfor %}"
)
WORDS = ["<unk>", "<|im_start|>", "<|im_end|>", "system", "user", "assistant", "Q", "A", "\n"]


@pytest.fixture(scope="module")
def chatml():
    vocabulary = {word: i for i, word in enumerate([*WORDS, *map(str, range(100))])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split("\n", "isolated"), pre_tokenizers.Split(" ", "removed")]
    )
    backend.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token="<|im_end|>",
        chat_template=CHATML,
        additional_special_tokens=["<|im_start|>"],
    )


def read(tmp_path, tokenizer, rows, **settings):
    files = write_jsonl(tmp_path / "rows.jsonl", rows)
    return SFTDataset(files, tokenizer, SFTDataConfig(train_files=files, **settings))


def trained_on(tokenizer, sample) -> list[str]:
    """Each token in the loss mask, with the token before it."""
    words = tokenizer.convert_ids_to_tokens(list(sample.ids))
    return [f"{words[i - 1]}→{words[i]}" for i in range(len(words)) if sample.loss_mask[i]]


def test_prompt_and_response(tmp_path, chatml):
    [sample] = read(tmp_path, chatml, [{"prompt": "1 2", "response": "3 4"}])
    words = chatml.convert_ids_to_tokens(list(sample.ids))
    assert words == [
        *("<|im_start|>", "user", "\n", "1", "2", "<|im_end|>", "\n"),
        *("<|im_start|>", "assistant", "\n", "3", "4", "<|im_end|>", "\n"),
    ]
    # The first word follows the prompt's last token, EOS is trained on, the line break is not.
    assert trained_on(chatml, sample) == ["\n→3", "3→4", "4→<|im_end|>"]
    assert sample.num_loss_tokens == 3


def test_prompt_and_response_inside_a_column(tmp_path, chatml):
    rows = [{"extra_info": {"question": "1", "solution": {"text": "3 4"}}}]
    keys = {"prompt_key": "extra_info", "response_key": "extra_info"}
    inside = {"prompt_dict_keys": ["question"], "response_dict_keys": ["solution", "text"]}
    [sample] = read(tmp_path, chatml, rows, **keys, **inside)
    [plain] = read(tmp_path, chatml, [{"prompt": "1", "response": "3 4"}])
    assert (sample.ids, sample.loss_mask) == (plain.ids, plain.loss_mask)
    inside["response_dict_keys"] = ["solution", "txt"]
    with pytest.raises(
        DataError, match=r"line 1: extra_info.solution has no 'txt', it has only te"
    ):
        read(tmp_path, chatml, rows, **keys, **inside)


def test_every_assistant_turn_of_a_chat(tmp_path, chatml):
    chat = [
        {"role": "system", "content": "9"},
        {"role": "user", "content": "1"},
        {"role": "assistant", "content": "2"},
        {"role": "user", "content": "3"},
        {"role": "assistant", "content": "4 5"},
    ]
    [sample] = read(tmp_path, chatml, [{"messages": chat}], messages_key="messages")
    assert trained_on(chatml, sample) == ["\n→2", "2→<|im_end|>", "\n→4", "4→5", "5→<|im_end|>"]
    full = chatml.apply_chat_template(chat, tokenize=True, return_dict=True)["input_ids"]
    assert list(sample.ids) == full


def test_solved_examples_in_a_prompt_are_not_trained_on(tmp_path, chatml):
    prompt = [
        {"role": "user", "content": "1"},
        {"role": "assistant", "content": "2"},
        {"role": "user", "content": "3"},
    ]
    [sample] = read(tmp_path, chatml, [{"prompt": prompt, "response": "4"}])
    assert trained_on(chatml, sample) == ["\n→4", "4→<|im_end|>"]


def test_eos_is_added_where_the_template_writes_none(tmp_path, chatml):
    rows = [{"prompt": "1", "response": "2 3"}]
    [sample] = read(tmp_path, chatml, rows, chat_template=PLAIN)
    assert trained_on(chatml, sample) == ["A→2", "2→3", "3→<|im_end|>"]
    assert sample.ids[-1] == chatml.eos_token_id


@pytest.mark.parametrize(
    ("truncation", "expected"),
    [("right", ["\n→3", "3→4", "4→5"]), ("left", ["3→4", "4→5", "5→6", "6→<|im_end|>"])],
)
def test_truncation(tmp_path, chatml, truncation, expected):
    rows = [{"prompt": "1", "response": "3 4 5 6"}]
    length = {"right": 12, "left": 6}[truncation]
    [sample] = read(tmp_path, chatml, rows, max_length=length, truncation=truncation)
    assert len(sample.ids) == length and trained_on(chatml, sample) == expected


@pytest.mark.parametrize(
    ("row", "settings", "message"),
    [
        ({"prompt": "1"}, {}, r"line 1 has no column 'response'; columns there: prompt"),
        ({"prompt": "1", "response": 4}, {}, r"response is 4, expected text"),
        ({"prompt": 7, "response": "4"}, {}, r"prompt is 7, expected a chat"),
        ({"prompt": "1", "response": "2 3"}, {"max_length": 8}, r"is 13 tokens, more than.*8"),
        (
            {"prompt": "1", "response": "2"},
            {"max_length": 6, "truncation": "right"},
            "no token of a response is left",
        ),
        (
            {"m": [{"role": "user", "content": "1"}]},
            {"messages_key": "m"},
            "no turn has the role assistant",
        ),
        (
            {"m": [{"role": "assistant", "content": "1"}, {"role": "user", "content": "2"}]},
            {"messages_key": "m"},
            "line 1: the chat starts with the assistant",
        ),
        ({"prompt": [], "response": "2"}, {}, "prompt is .., expected a chat"),
        (
            {"prompt": "1", "response": "2"},
            {"chat_template": "{{ '' }}"},
            "line 1: the chat template does not write the content in turn 1",
        ),
        (
            {"prompt": "1", "response": "2"},
            {"chat_template": "{{ messages|length }}{{ messages|map(attribute='content')|join }}"},
            "changes turn 1 when other turns are there",
        ),
        (
            {"prompt": "1", "response": "2"},
            {"chat_template": "{{ raise_exception('no') }}"},
            "the chat template refuses this chat: no",
        ),
    ],
)
def test_refusals(tmp_path, chatml, row, settings, message):
    with pytest.raises(DataError, match=message):
        read(tmp_path, chatml, [row], **settings)
