"""The cache of tokenised data: written once, shared, and a new entry for any change."""

import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from hybridengine.config import DataConfig, SFTDataConfig
from hybridengine.data import DataError, PromptDataset, chats
from hybridengine.data import cache as cache_files
from hybridengine.data.cache import CachedDataset
from hybridengine.data.conversations import SFTDataset
from tests.data.rows import TEMPLATE, row, write_jsonl


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("HYBRIDENGINE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "data"


@pytest.fixture
def rendered(monkeypatch):
    """The rows rendered so far."""
    seen, render = [], chats.ChatTemplate.render

    def counting(self, where, *arguments):
        seen.append(where)
        return render(self, where, *arguments)

    monkeypatch.setattr(chats.ChatTemplate, "render", counting)
    return seen


def test_prompts_are_tokenised_once(tokenizer, tmp_path, cache, rendered):
    file = write_jsonl(tmp_path / "a.jsonl", [row(f"{n} 1", truth=n) for n in range(7)])
    data = DataConfig(max_prompt_length=99)
    first, again = PromptDataset(file, tokenizer, data), PromptDataset(file, tokenizer, data)
    assert len(rendered) == 7
    assert list(first) == list(again) and len(again) == 7
    assert again[-1] == again[6] and again[2:4] == [again[2], again[3]]
    with pytest.raises(IndexError):
        again[7]
    moved = tmp_path / "elsewhere.jsonl"  # the same content
    os.rename(file, moved)
    assert list(PromptDataset(str(moved), tokenizer, data)) == list(first)
    assert len(rendered) == 7
    # A setting that does not change the prompts uses the same entry.
    PromptDataset(str(moved), tokenizer, DataConfig(max_prompt_length=99, train_batch_size=3))
    assert len(rendered) == 7


@pytest.mark.parametrize("change", ["data", "template", "length", "tokenizer", "key"])
def test_a_change_makes_a_new_entry(tokenizer, tmp_path, cache, rendered, change):
    rows = [row("1 2", question=row("3")["prompt"])]
    file = write_jsonl(tmp_path / "a.jsonl", rows)
    PromptDataset(file, tokenizer, DataConfig())
    settings = {}
    if change == "data":
        write_jsonl(tmp_path / "a.jsonl", [row("1 3", question=row("3")["prompt"])])
    elif change == "template":
        settings["chat_template"] = TEMPLATE + " 5"
    elif change == "length":
        settings["max_prompt_length"] = 8
    elif change == "key":
        settings["prompt_key"] = "question"
    else:
        import copy

        tokenizer = copy.deepcopy(tokenizer)
        tokenizer.add_tokens(["<new>"])
    PromptDataset(file, tokenizer, DataConfig(**settings))
    assert len(rendered) == 2
    PromptDataset(file, tokenizer, DataConfig(**settings))
    assert len(rendered) == 2


def test_the_number_of_dropped_rows_is_cached(tokenizer, tmp_path, cache):
    file = write_jsonl(tmp_path / "a.jsonl", [row("1 2 3 4 5"), row("7")])
    data = DataConfig(max_prompt_length=4, filter_overlong_prompts=True)
    for _ in range(2):
        dataset = PromptDataset(file, tokenizer, data)
        assert (len(dataset), dataset.dropped, dataset[0].index) == (1, 1, 1)


@pytest.mark.parametrize("unwritable", ["{tmp_path}/a.jsonl", "~nobody-of-this-name/cache"])
def test_memory_and_cache_hold_the_same_conversations(
    tokenizer, tmp_path, cache, monkeypatch, capsys, unwritable
):
    rows = [{"prompt": str(n), "response": f"{n} 2"} for n in range(600)]  # several chunks
    file = write_jsonl(tmp_path / "a.jsonl", rows)
    data = SFTDataConfig(train_files=file)
    made, read = SFTDataset(file, tokenizer, data), SFTDataset(file, tokenizer, data)
    monkeypatch.setenv("HYBRIDENGINE_CACHE", unwritable.format(tmp_path=tmp_path))
    held = SFTDataset(file, tokenizer, data)
    assert list(made) == list(read) == list(held) and len(held) == 600
    assert "tokenised data is not cached: " in capsys.readouterr().err


def test_a_bad_row_leaves_no_entry(tokenizer, tmp_path, cache):
    file = write_jsonl(tmp_path / "a.jsonl", [row(), row(prompt=3)])
    for _ in range(2):
        with pytest.raises(DataError, match="line 2: prompt is 3"):
            PromptDataset(file, tokenizer, DataConfig())
    assert [f.suffix for f in cache.iterdir()] == [".lock"]


@pytest.mark.parametrize("size", [-1, -8, -24, 16, 8, 0])
def test_a_damaged_entry_is_rewritten(cache, size):
    assert list(CachedDataset("key", lambda: [1, None, "two"])) == [1, "two"]
    damaged = cache / "key"
    damaged.write_bytes(damaged.read_bytes()[:size])
    again = CachedDataset("key", lambda: [3, None, None])
    assert list(again) == [3] and again.dropped == 2


def test_an_entry_without_samples(cache):
    for _ in range(2):
        empty = CachedDataset("key", lambda: [None])
        assert (list(empty), empty.dropped) == ([], 1)


def test_unused_entries_are_removed(cache):
    for key in ("unused", "used"):
        CachedDataset(key, lambda: [1])
    long_ago = time.time() - 2 * cache_files._MAX_UNUSED_S
    for path in cache.iterdir():
        os.utime(path, (long_ago, long_ago))
    assert list(CachedDataset("used", lambda: [2])) == [1]  # which renews it
    CachedDataset("new", lambda: [3])
    assert {path.name for path in cache.iterdir() if not path.suffix} == {"used", "new"}
    assert list(CachedDataset("unused", lambda: [4])) == [4]


def test_one_process_writes_and_the_others_wait(cache):
    """Threads in place of ranks: each opens the lock file itself."""
    made = []

    def make():
        made.append(threading.get_ident())
        time.sleep(0.2)
        yield from range(5)

    with ThreadPoolExecutor(3) as pool:
        found = pool.map(lambda _: list(CachedDataset("key", make)), range(3))
        assert list(found) == [list(range(5))] * 3
    assert len(made) == 1
