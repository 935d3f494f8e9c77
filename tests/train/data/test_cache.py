"""The cache of tokenised data: written once, shared, and a new entry for any change."""

import math
import os
import pickle
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timedelta, timezone
from decimal import Decimal
from types import SimpleNamespace
from typing import Any
from uuid import UUID

import pytest
from tokenizers import AddedToken

from hybridengine.run.config import DataConfig, SFTDataConfig
from hybridengine.train.data import DataError, PromptDataset, PromptSample, chats
from hybridengine.train.data import cache as cache_files
from hybridengine.train.data.cache import CachedDataset, fingerprint
from hybridengine.train.data.conversations import SFTDataset
from tests.train.checkpoint.hostile import Call
from tests.train.data.rows import TEMPLATE, row, write_jsonl


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


@pytest.mark.parametrize("size", [-1, -8, -28, 28, 8, 0])
def test_a_damaged_entry_is_rewritten(cache, size):
    assert list(CachedDataset("key", lambda: [1, None, "two"], Any)) == [1, "two"]
    damaged = cache / "key"
    damaged.write_bytes(damaged.read_bytes()[:size])
    again = CachedDataset("key", lambda: [3, None, None], Any)
    assert list(again) == [3] and again.dropped == 2


def damage_cases(written: bytes):
    """300 flipped bits, and 20 truncations."""
    draw = random.Random(26)
    for bit in (draw.randrange(8 * len(written)) for _ in range(300)):
        damaged = bytearray(written)
        damaged[bit // 8] ^= 1 << bit % 8
        yield bytes(damaged)
    for size in range(0, len(written), len(written) // 20):
        yield written[:size]


@pytest.mark.parametrize("in_use", [False, True])
def test_a_damaged_entry_never_gives_other_data(cache, in_use):
    """An entry that is opened is made anew or ends in an error; one in use, in an error."""
    samples = [
        PromptSample(n, [n, 7], f"{n}", "source", n, {"k": [n, 0.5]}, [{"role": "user"}])
        for n in range(8)
    ]
    entry, made = cache / "key", 0

    def make():
        nonlocal made
        made += 1
        return samples

    CachedDataset("key", make, PromptSample)
    written, num_cases, num_errors = entry.read_bytes(), 0, 0
    for damaged in damage_cases(written):
        entry.write_bytes(written if in_use else damaged)
        dataset = CachedDataset("key", make, PromptSample)
        num_cases += 1
        if in_use:
            entry.write_bytes(damaged)
        try:
            assert list(dataset) == samples
        except DataError as error:
            assert "is damaged at sample" in str(error) and not entry.exists()
            num_errors += 1
    size = len(written) - 28
    in_footer = sum(damaged[:size] == written[:size] for damaged in damage_cases(written))
    assert num_errors == num_cases - in_footer if in_use else num_errors + made - 1 == num_cases


def test_values_of_parquet_and_json_come_back_as_they_were(cache):
    moment = datetime(2026, 2, 3, 4, 5, 6, 789, timezone(timedelta(hours=2)))
    row = {
        "plain": [None, True, -1, 2**64 - 1, 0.1, math.inf, "tëxt\0", b"\xff", {"": []}],
        "integers": [2**64, -(2**63) - 1, 10**40],
        "times": [
            moment,
            moment.replace(tzinfo=None),
            moment.date(),
            moment.time(),
            timedelta(days=-1, microseconds=7),
        ],
        "other": [Decimal("1.50"), UUID(int=5), ("a", (1, [2]))],
    }
    sample = PromptSample(3, [1, 70000], "text", "source", row, {"row": row}, [{"content": "c"}])
    for _ in range(2):
        [read] = CachedDataset("key", lambda: [sample], PromptSample)
        assert read == sample and repr(read) == repr(sample)


def test_no_entry_names_code(cache):
    CachedDataset("key", lambda: [1], Any)
    ran, entry = cache / "ran", cache / "key"
    entry.write_bytes(pickle.dumps(Call(os.system, f"touch {ran}")))
    assert list(CachedDataset("key", lambda: [2], Any)) == [2]
    assert not ran.exists()


def test_an_entry_without_samples(cache):
    for _ in range(2):
        empty = CachedDataset("key", lambda: [None], Any)
        assert (list(empty), empty.dropped) == ([], 1)


def test_unused_entries_are_removed(cache):
    for key in ("unused", "used"):
        CachedDataset(key, lambda: [1], Any)
    long_ago = time.time() - 2 * cache_files.MAX_UNUSED_S
    for path in cache.iterdir():
        os.utime(path, (long_ago, long_ago))
    assert list(CachedDataset("used", lambda: [2], Any)) == [1]  # which renews it
    CachedDataset("new", lambda: [3], Any)
    assert {path.name for path in cache.iterdir() if not path.suffix} == {"used", "new"}
    assert list(CachedDataset("unused", lambda: [4], Any)) == [4]


def test_one_process_writes_and_the_others_wait(cache):
    """Threads in place of ranks: each opens the lock file itself."""
    made = []

    def make():
        made.append(threading.get_ident())
        time.sleep(0.2)
        yield from range(5)

    with ThreadPoolExecutor(3) as pool:
        found = pool.map(lambda _: list(CachedDataset("key", make, Any)), range(3))
        assert list(found) == [list(range(5))] * 3
    assert len(made) == 1


def test_every_special_token_is_part_of_the_key():
    """Also of a tokenizer without a backend, and of tokens without a name such as EOS."""

    def key(is_special: bool) -> str:
        slow = SimpleNamespace(
            get_vocab=lambda: {"a": 0, "<x>": 1},
            added_tokens_decoder={1: AddedToken("<x>", special=is_special)},
            all_special_ids=[],
            eos_token_id=None,
        )
        return fingerprint(slow, "")

    assert key(True) == key(True) != key(False)
