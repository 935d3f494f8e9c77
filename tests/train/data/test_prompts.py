"""Prompt files: rows become token ids, every error names its row."""

import datetime
import decimal
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hybridengine.engine.response import Response
from hybridengine.run.config import DataConfig
from hybridengine.train.data import DataError, PromptDataset
from hybridengine.train.rollout_files import rollout_line
from hybridengine.train.rollouts import ScoredResponse
from tests.train.data.rows import TEMPLATE, row, write_jsonl


def test_a_row_becomes_token_ids(tokenizer, tmp_path):
    file = write_jsonl(tmp_path / "a.jsonl", [row("1 2 3"), row("4 5", truth="9")])
    first, second = PromptDataset(file, tokenizer, DataConfig())
    assert first.prompt_text == "user 1 2 3 assistant"
    assert first.prompt_ids == tokenizer("user 1 2 3 assistant")["input_ids"]
    assert (first.data_source, first.ground_truth) == ("sums", "6")
    assert first.extra_info == {"split": "train"}
    assert (second.index, second.ground_truth) == (1, "9")


def test_parquet_and_jsonl_give_the_same(tokenizer, tmp_path):
    rows = [row("1 2", truth="3"), row("7", truth="7")]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    parquet = PromptDataset(str(tmp_path / "a.parquet"), tokenizer, DataConfig())
    jsonl = PromptDataset(write_jsonl(tmp_path / "a.jsonl", rows), tokenizer, DataConfig())
    assert list(parquet) == list(jsonl)


TRUTHS = [decimal.Decimal("1.50"), datetime.date(2020, 2, 1), b"ab", None, 3, [1, 2], {"a": 1}]


@pytest.mark.parametrize("truth", TRUTHS, ids=lambda t: type(t).__name__)
def test_any_ground_truth_reaches_the_reward_and_the_file_of_rollouts(tokenizer, tmp_path, truth):
    pq.write_table(pa.Table.from_pylist([row("1", truth=truth)]), tmp_path / "a.parquet")
    [sample] = PromptDataset(str(tmp_path / "a.parquet"), tokenizer, DataConfig())
    assert sample.ground_truth == truth
    response = ScoredResponse(Response([5], [-0.5], "stop"), text="2")
    written = json.loads(rollout_line(sample, response))["ground_truth"]
    plain = truth is None or isinstance(truth, int | list | dict)
    assert written == (truth if plain else str(truth))


def test_several_files_and_own_keys(tokenizer, tmp_path):
    renamed = row("8")
    renamed["question"], renamed["source"] = renamed.pop("prompt"), renamed.pop("data_source")
    del renamed["extra_info"]
    files = [write_jsonl(tmp_path / f"{name}.jsonl", [renamed]) for name in "ab"]
    data = DataConfig(prompt_key="question", reward_fn_key="source")
    samples = list(PromptDataset(files, tokenizer, data))
    assert [s.index for s in samples] == [0, 1]
    assert samples[0].extra_info == {}


def test_chat_template_as_text_and_as_file(tokenizer, tmp_path):
    file = write_jsonl(tmp_path / "a.jsonl", [row("1 2")])
    own = "{% for m in messages %}{{ m.content }}{% endfor %}"
    (tmp_path / "t.jinja").write_text(own)
    for template in (own, str(tmp_path / "t.jinja")):
        [sample] = PromptDataset(file, tokenizer, DataConfig(chat_template=template))
        assert sample.prompt_text == "1 2"


@pytest.mark.parametrize(("truncation", "text"), [("left", "2 3 assistant"), ("right", "user 1 2")])
def test_truncation(tokenizer, tmp_path, truncation, text):
    file = write_jsonl(tmp_path / "a.jsonl", [row("1 2 3")])
    data = DataConfig(max_prompt_length=3, truncation=truncation)
    [sample] = PromptDataset(file, tokenizer, data)
    assert tokenizer.decode(sample.prompt_ids) == sample.prompt_text == text


def test_overlong_prompts_are_dropped_and_counted(tokenizer, tmp_path):
    file = write_jsonl(tmp_path / "a.jsonl", [row("1 2 3 4 5"), row("7"), row("1 2 3 4 5 6")])
    dataset = PromptDataset(
        file, tokenizer, DataConfig(max_prompt_length=4, filter_overlong_prompts=True)
    )
    assert [s.index for s in dataset] == [1]
    assert dataset.dropped == 2


def without(column: str) -> dict:
    return {k: v for k, v in row().items() if k != column}


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (without("prompt"), "line 2 has no column 'prompt'; columns there: data_source, ability"),
        (without("data_source"), "line 2 has no column 'data_source'"),
        (without("reward_model"), "line 2 has no column 'reward_model'"),
        (row(reward_model={"style": "rule"}), "line 2: reward_model is .* with ground_truth"),
        (row(prompt="1 + 1"), "line 2: prompt is '1 [+] 1', expected a chat"),
        (row(prompt=[]), "line 2: prompt is .*expected a chat"),
        (row(prompt=[{"role": "user"}]), "line 2: prompt is .*expected a chat"),
        (row(extra_info=[1]), "line 2: extra_info is"),
        (row(" ".join("1" * 20)), "line 2: the prompt is 22 tokens, more than .* 16; raise it"),
    ],
)
def test_bad_rows_name_the_line(tokenizer, tmp_path, bad, message):
    file = write_jsonl(tmp_path / "a.jsonl", [row(), bad])
    with pytest.raises(DataError, match=message):
        PromptDataset(file, tokenizer, DataConfig(max_prompt_length=16))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b'\n{"a": \n', "line 2 is not JSON"),
        ("a.jsonl", b"[1, 2]\n", "line 1 is a JSON list, expected an object"),
        ("a.jsonl", b"\xff\xfe\n", "line 1 is not UTF-8"),
        ("a.jsonl", b"", "the data file is empty"),
        ("a.parquet", b"not parquet at all", "is not a readable parquet file"),
        ("a.csv", b"a,b\n", "ends in '.csv', expected .parquet, .arrow, .jsonl, .json"),
    ],
)
def test_bad_files(tokenizer, tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message):
        PromptDataset(str(tmp_path / name), tokenizer, DataConfig())


def test_missing_file(tokenizer, tmp_path):
    with pytest.raises(DataError, match=r"none\.parquet does not exist; check the path"):
        PromptDataset(str(tmp_path / "none.parquet"), tokenizer, DataConfig())


def test_all_prompts_overlong(tokenizer, tmp_path):
    file = write_jsonl(tmp_path / "a.jsonl", [row("1 2 3")])
    data = DataConfig(max_prompt_length=2, filter_overlong_prompts=True)
    with pytest.raises(DataError, match="all 1 prompts"):
        PromptDataset(file, tokenizer, data)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("no_such_template.jinja", "neither a Jinja text nor a file"),
        ("{{ raise_exception('no system role') }}", "refuses this chat: no system role"),
        ("{% for m in messages %}{% endfor %}", "made an empty prompt"),
    ],
)
def test_bad_templates(tokenizer, tmp_path, template, message):
    file = write_jsonl(tmp_path / "a.jsonl", [row()])
    with pytest.raises(DataError, match=message):
        PromptDataset(file, tokenizer, DataConfig(chat_template=template))


def test_tokenizer_without_template(tokenizer, tmp_path):
    file = write_jsonl(tmp_path / "a.jsonl", [row()])
    tokenizer.chat_template = None
    try:
        with pytest.raises(DataError, match=r"no chat template; set data\.chat_template"):
            PromptDataset(file, tokenizer, DataConfig())
    finally:
        tokenizer.chat_template = TEMPLATE


def test_rows_of_trl(tokenizer, tmp_path):
    chat = [{"role": "user", "content": "1 2"}]
    rows = [{"prompt": chat, "answer": "3", "level": 1}, {"prompt": chat, "ground_truth": "4"}]
    first, second = PromptDataset(write_jsonl(tmp_path / "a.jsonl", rows), tokenizer, DataConfig())
    assert (first.chat, first.ground_truth, first.data_source) == (chat, None, "data")
    assert first.extra_info == {"answer": "3", "level": 1}
    assert (second.ground_truth, second.extra_info) == ("4", {})
