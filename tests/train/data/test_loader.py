"""The order of prompts: the same on every rank, whole epochs, exact after a resume."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridengine.run.config import DataConfig
from hybridengine.train.data import DataError, PromptDataset, PromptLoader, Subset
from tests.train.data.rows import row, write_jsonl


def loader(n=10, batch=3, seed=1, shuffle=True) -> PromptLoader:
    return PromptLoader(range(n), batch, seed=seed, shuffle=shuffle)  # type: ignore[arg-type]


@given(st.integers(1, 40), st.integers(1, 40), st.integers(0, 5))
def test_an_epoch_sees_no_prompt_twice(n, batch, seed):
    if batch > n:
        with pytest.raises(DataError, match=f"only {n} training prompts"):
            loader(n, batch)
        return
    one, other = loader(n, batch, seed), loader(n, batch, seed)
    for epoch in range(2):
        seen = []
        for _ in range(len(one)):
            assert one.epoch == epoch
            given_batch = list(one.next_batch())
            assert given_batch == list(other.next_batch())
            seen += given_batch
        assert len(set(seen)) == len(seen) == n // batch * batch


def test_epochs_and_seeds_differ():
    one, other = loader(seed=1), loader(seed=2)
    first = [list(one.next_batch()) for _ in range(len(one))]
    second = [list(one.next_batch()) for _ in range(len(one))]
    assert first != second
    assert first != [list(other.next_batch()) for _ in range(len(other))]


def test_no_shuffle_is_file_order():
    one = loader(7, 3, shuffle=False)
    assert [list(one.next_batch()) for _ in range(3)] == [[0, 1, 2], [3, 4, 5], [0, 1, 2]]


@given(st.integers(0, 12))
def test_resume_goes_on_exactly(steps):
    straight, resumed = loader(), loader()
    for _ in range(steps):
        straight.next_batch()
    resumed.load_state_dict(straight.state_dict())
    for _ in range(5):
        assert straight.epoch == resumed.epoch
        assert list(straight.next_batch()) == list(resumed.next_batch())


def test_resume_on_other_data_is_refused():
    with pytest.raises(DataError, match="prompts was 10 and is 11"):
        loader(11).load_state_dict(loader(10).state_dict())


@pytest.mark.parametrize("change", ["reversed", "edited", "same rows, moved"])
def test_changed_rows_are_noticed_at_resume(tokenizer, tmp_path, change):
    rows = [row(f"{n}", truth=n) for n in range(10)]

    def loader_of(rows, file):
        data = PromptDataset(write_jsonl(tmp_path / file, rows), tokenizer, DataConfig())
        return PromptLoader(data, 3, seed=1)

    state = loader_of(rows, "a.jsonl").state_dict()
    state = json.loads(json.dumps(state))
    if change == "same rows, moved":
        loader_of(rows, "b.jsonl").load_state_dict(state)
        return
    changed = rows[::-1] if change == "reversed" else [*rows[:4], row("4", truth=5), *rows[5:]]
    resumed = loader_of(changed, "a.jsonl")
    with pytest.raises(DataError, match=r"the rows of data\.train_files have changed"):
        resumed.load_state_dict(state)
    del state["content"]  # of an older version
    resumed.load_state_dict(state)


def test_a_subset_reads_from_its_dataset_when_accessed():
    data = list("abcde")
    some = Subset(data, [4, 0, 2])
    data[0] = "A"
    assert list(some) == ["e", "A", "c"] and list(some[1:]) == ["A", "c"]
    assert list(some.take([2, 0]) + some[:1]) == ["c", "e", "e"]
    with pytest.raises(ValueError, match="expected one dataset"):
        some + Subset(list("xyz"), [0])
