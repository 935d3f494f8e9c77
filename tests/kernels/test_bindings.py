"""hybridengine._C called directly with arguments that would lead outside of memory."""

from __future__ import annotations

import sys

import pytest
import torch

import hybridengine._C as C
from tests.forked import run_forked

FAR = 1 << 40
I32, I64, BF16 = torch.int32, torch.int64, torch.bfloat16
NO_OPTIONS = (1.0, None, 1.0, 0.0, -100, None, None, False)


@pytest.mark.slow
def test_random_calls_return_or_raise() -> None:
    """A sample of what `make test-sanitized` runs; the calls run in a process of their own."""
    command = [sys.executable, "-m", "tools.fuzz", "--calls", "1500"]
    done = run_forked(command, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    right = [*command[:-1], "500", "--right"]  # so that calls come as far as the kernels
    done = run_forked(right, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_function_has_random_calls() -> None:
    from tools.fuzz.calls import FUNCTIONS

    called = {make.__name__ for make, _ in FUNCTIONS}
    functions = {n for n in dir(C) if not n.startswith("_") and callable(getattr(C, n))}
    assert functions - called == {"LogProbOptions", "CopyTable", "ChangeTable", "Graph"}


@pytest.mark.parametrize(
    "ends", [[0, 9, 6], [-3, 2, 6], [1, 2, 6], [0, -1, 6]], ids=["down", "negative", "1", "below"]
)
def test_sparse_rows_that_do_not_ascend(ends: list[int]) -> None:
    hidden, weight = torch.zeros(2, 4), torch.zeros(8, 4)
    ids, cu_kept = torch.zeros(6, dtype=I32), torch.tensor(ends, dtype=I32)
    with pytest.raises(ValueError, match="cu_kept"):
        C.sparse_logits(hidden, weight, ids, cu_kept, 0)
    with pytest.raises(ValueError, match="cu_kept"):
        C.sparse_hidden_grad(hidden, weight, ids, cu_kept, 0, torch.zeros(6))


@pytest.mark.parametrize("first_id", [-1, 1 << 31, (1 << 63) - 1])
def test_a_first_id_that_no_int32_id_reaches(first_id: int) -> None:
    """Its difference to a negative id would overflow."""
    hidden, weight = torch.zeros(2, 4), torch.zeros(8, 4)
    ids, ends = torch.full((6,), -(1 << 31), dtype=I32), torch.tensor([0, 3, 6], dtype=I32)
    with pytest.raises(ValueError, match="first_id"):
        C.sparse_logits(hidden, weight, ids, ends, first_id)
    with pytest.raises(ValueError, match="first_id"):
        C.sparse_weight_grad(
            hidden, weight, ids, ends, first_id, torch.zeros(6), torch.zeros(8, 4), True
        )


def test_sparse_arguments_on_another_device() -> None:
    hidden, weight, ids = torch.zeros(2, 4), torch.zeros(8, 4), torch.zeros(6, dtype=I32)
    ends = torch.tensor([0, 3, 6], dtype=I32)
    with pytest.raises(ValueError, match="cu_kept is on meta"):
        C.sparse_logits(hidden, weight, ids, ends.to("meta"), 0)
    with pytest.raises(ValueError, match="grad_logits is on meta"):
        C.sparse_hidden_grad(hidden, weight, ids, ends, 0, torch.zeros(6, device="meta"))


@pytest.mark.parametrize("offset", [0, 1, 7])
def test_sent_values_in_the_memory_of_the_current_ones(offset: int) -> None:
    values = torch.zeros(64, dtype=BF16)
    mask = torch.zeros(1, dtype=I32)
    with pytest.raises(ValueError, match="sent shares memory with current"):
        C.mark_changed(values[:32], values[offset : offset + 32], mask)
    C.mark_changed(values[:32], values[32:], mask)


@pytest.mark.parametrize("top_p", [1.0, 0.5])
def test_min_p_of_logits_that_overflow_by_their_temperature(top_p: float) -> None:
    """Without top-p there is no bound from it; all scaled logits are -inf."""
    logits = torch.full((1, 3), -1e38)
    numbers = [torch.tensor([x]) for x in (8e-4, top_p, 0.25)]
    temperature, p, min_p = numbers
    no_k, seed, position = torch.zeros(1, dtype=I32), torch.tensor([7]), torch.tensor([32])
    tokens, _, num_kept, _ = C.sample_tokens(
        logits, temperature, no_k, p, min_p, seed, position, False
    )
    assert 0 <= int(tokens) < 3 and 0 < int(num_kept) <= 3


@pytest.mark.parametrize("row", [3, 1 << 30])
def test_a_gradient_row_that_is_not_there(row: int) -> None:
    logits, results = torch.randn(2, 5), [torch.zeros(2), torch.zeros(2), torch.zeros(2, 2)]
    index = torch.tensor([0, row], dtype=I32)
    with pytest.raises(IndexError, match=rf"row_index\[1\] is {row}, but grad_logits has 3 rows"):
        C.log_prob_backward(
            logits,
            torch.zeros(2, dtype=I64),
            C.LogProbOptions(*NO_OPTIONS),
            results,
            torch.ones(2),
            None,
            torch.zeros(3, 5),
            index,
            None,
        )


def changed(ends: list[int], num_changed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Take the changes of 40 elements, of which three are marked."""
    mask = torch.tensor([0b11, 0b1], dtype=I32)
    return C.take_changed([mask], [torch.arange(40.0).bfloat16()], torch.tensor(ends), num_changed)


@pytest.mark.parametrize(
    "ends, num_changed, message",
    [
        ([3], 2, "num_changed is 2, but ends goes to 3"),
        ([-1], -1, r"ends\[0\] is -1"),
        ([2], 2, "do not mark as many"),
        ([4], 4, "do not mark as many"),
    ],
)
def test_counts_that_are_not_those_of_the_masks(
    ends: list[int], num_changed: int, message: str
) -> None:
    assert changed([3], 3)[0].tolist() == [0, 1, 32]
    with pytest.raises(ValueError, match=message):
        changed(ends, num_changed)


def test_marks_past_the_end_are_ignored() -> None:
    mask = torch.tensor([0b1, -1], dtype=I32)
    counts = C.count_changed([mask], [34])
    assert counts.tolist() == [3]
    indices, _ = C.take_changed([mask], [torch.zeros(34, dtype=BF16)], counts.long(), 3)
    assert indices.tolist() == [0, 32, 33]
    with pytest.raises(ValueError, match=r"numels\[0\] is -1"):
        C.count_changed([mask[:0]], [-1])


def copy_row(dst_offset: int = 0) -> torch.Tensor:
    row = [0, 0, 0, dst_offset] + [1, 1, 1, 4] + [0, 0, 0, 1] * 2
    return torch.tensor([row])


def test_quantization_by_a_table_without_blocks() -> None:
    with pytest.raises(ValueError, match="without blocks"):
        C.CopyTable(copy_row()).absmax([torch.ones(4)], torch.zeros(0, dtype=I32), BF16)


def test_a_row_that_writes_elements_again() -> None:
    table = copy_row()
    table[0, 4] = FAR  # with strides of 0
    with pytest.raises(ValueError, match="row 0 writes 4398046511104 elements to 4"):
        C.strided_copy([torch.zeros(4)], [torch.zeros(4)], table)


def test_a_table_that_only_reads_names_no_destination() -> None:
    table = copy_row()
    table[0, 12:] = 0  # strides of the destination
    bits = torch.zeros(1, dtype=I32)
    copy = C.CopyTable(table, torch.zeros(1, dtype=torch.int64))
    copy.absmax([torch.tensor([1.0, -3.0, 2.0, 0.0])], bits, BF16)
    assert bits.view(torch.float32).item() == 3
    with pytest.raises(ValueError, match="row 0 writes 4 elements to 1"):
        copy.copy([torch.zeros(4)], [torch.zeros(4)])


def test_an_empty_view_of_a_large_storage() -> None:
    empty, full = torch.zeros(64).as_strided((0,), (1,)), torch.zeros(64)
    for sources, destinations in (([empty], [full]), ([full], [empty])):
        with pytest.raises(IndexError, match="which has 0 elements"):
            C.strided_copy(sources, destinations, copy_row())


@pytest.mark.parametrize(
    "column, value",
    [(0, 1 << 31), (0, 1 << 32), (1, -1), (3, 1 << 62), (12, 1 << 61), (7, 1 << 62), (4, 1 << 62)],
)
def test_changes_with_a_table_of_no_tensors(column: int, value: int) -> None:
    table = copy_row()
    table[0, 4], table[0, 8], table[0, 12] = 2, 8, 8
    table[0, column] = value
    with pytest.raises((IndexError, ValueError), match=r"ChangeTable: .*row 0"):
        C.ChangeTable(table, torch.device("cpu"))


def test_changes_that_do_not_ascend_stay_inside() -> None:
    table = copy_row(dst_offset=8)
    table[0, 2] = 8  # elements 8 to 11 of the source go to 8 to 11
    memory = torch.zeros(64, dtype=BF16)
    indices = torch.tensor([9, -FAR, 3, 8, 200, 11, 0, 10])
    changes = C.ChangeTable(table, torch.device("cpu"))
    changes.scatter([indices], [torch.ones(8, dtype=BF16)], [memory[16:48]])
    assert not memory[:24].any() and not memory[28:].any()


@pytest.mark.parametrize("positions", [[5, 5], [7, 3], [0, 1 << 50], [-2, 4]])
def test_gaps_of_positions_that_do_not_ascend(positions: list[int]) -> None:
    with pytest.raises(ValueError, match=r"positions\[[01]\] is"):
        C.encode_gaps(torch.tensor(positions), 0)
    swinging = torch.tensor([0, 1 << 62] * 600)  # whose sum of gaps is above 2^63
    with pytest.raises(ValueError, match="ascending"):
        C.encode_gaps(swinging, 0)


def test_numbers_that_no_enumeration_has() -> None:
    x = torch.zeros(3)
    with pytest.raises(ValueError, match="estimator is 7"):
        C.group_advantage(x, torch.zeros(3, dtype=I64), 7, True, 1e-6, None, None, None, 0)
    for numbers, name in (((13, 0, 0), "mode"), ((0, 5, 0), "agg_mode"), ((0, 0, -1), "kl_type")):
        with pytest.raises(ValueError, match=f"{name} is"):
            C.policy_loss(
                x, x, x, *[None] * 8, *numbers, False, False, [0.2] * 9, [0.0] * 5, *[False] * 3
            )


def test_sizes_beyond_memory() -> None:
    x, index = torch.zeros(2, 3), torch.zeros(2, dtype=I64)
    for call in (
        lambda: C.balance([1, 2], FAR, True),
        lambda: C.balance_by_tokens([1, 2], 4, FAR, 1),
        lambda: C.balance_by_tokens([1, 2], 4, 1, FAR),
        lambda: C.balance([1 << 62, 1 << 61], 2, False),
        lambda: C.move_rows([x], index, None, 1, [-1, -2], [0.0], [0]),
    ):
        with pytest.raises(ValueError):
            call()
    with pytest.raises(ValueError, match="must not be negative"):
        C.empty_from_pool([-2, -(1 << 21)], torch.float32)
    with pytest.raises(ValueError, match="more bytes than an address counts"):
        C.empty_from_pool([1 << 33, 1 << 31], torch.float32)


def test_rows_from_the_largest_index() -> None:
    index = torch.tensor([2**63 - 1, 0, -(2**63)])
    with pytest.raises(IndexError, match="outside the 2 rows"):
        C.move_rows([torch.zeros(2, 3)], index, None, 1, [3], [0.0], [0])


def test_a_window_with_negative_positions() -> None:
    query = torch.zeros(2, 1, 4)
    ends, positions = torch.tensor([2, 2], dtype=I32), torch.tensor([0, -5], dtype=I32)
    with pytest.raises(ValueError, match=r"position_ids\[1\] is -5; expected 0"):
        C.attention_forward(query, query, query, None, ends, positions, 1.0, 2, None)
