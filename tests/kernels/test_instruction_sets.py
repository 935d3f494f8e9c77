"""The CPU kernels of narrower instruction sets pass the tests that the widest one passes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.isa import LIMITS
from hybridengine._C import cpu_isa

ROOT = Path(__file__).parent.parent.parent
# Tests of kernels that depend on the instruction set, by module of tests/kernels; []: all of it.
CASES = {
    "test_block_quantize.py": ["test_any_size_and_strides", "test_casts_are_torchs"],
    "test_changes.py": [
        "test_what_is_marked_is_taken_in_order",
        "test_any_sizes",
        "test_marked_are_the_elements_whose_bits_differ",
        "test_a_marked_element_equals_that_of_a_dense_copy",
    ],
    "test_checksum.py": ["test_it_is_the_weighted_sum_of_the_words"],
    "test_decode_linear.py": [],
    "test_grouped_linear.py": [],
    "test_delta_ops.py": ["test_a_table_moves_changes_as_strided_copy_moves_all"],
    "test_strided_copy.py": ["test_slices_side_by_side"],
    "policy_loss/test_policy_loss.py": ["test_every_mode_and_aggregation", "test_random_batches"],
    "packing/test_packing.py": [
        "test_every_dtype_survives_both_ways",
        "test_results_that_bypass_the_caches",
    ],
    "advantage/test_advantage.py": [
        "test_group_advantage_equals_the_reference",
        "test_gae_equals_the_reference",
    ],
    "sampling/test_sample_tokens.py": [
        "test_against_float64",
        "test_random_rows",
        "test_a_row_does_not_depend_on_other_rows_threads_or_strides",
    ],
    "sampling/test_sample_tokens_hostile.py": [
        "test_rows_that_cannot_be_sampled",
        "test_extreme_logits",
        "test_extreme_temperatures",
        "test_equal_logits",
    ],
    "logprob/test_logprob.py": ["test_error_is_at_most_twice_that_of_plain_pytorch"],
    "logprob/test_logprob_hostile.py": [
        "test_minus_infinity_removes_an_entry",
        "test_a_removed_token_has_log_prob_minus_infinity",
        "test_a_row_with_all_entries_removed_has_no_gradient",
        "test_gradient_of_the_token_as_p_goes_to_one",
        "test_peaked_rows_have_at_most_twice_the_error_of_plain_pytorch",
        "test_the_position_of_large_and_removed_entries_does_not_matter",
        "test_non_contiguous_and_unaligned_rows",
        "test_nan_among_removed_entries_gives_nan",
    ],
    "attention/test_paged_attention.py": [
        "test_the_bits_are_those_of_the_trainer",
        "test_the_bits_of_decoding_at_every_length",
        "test_against_float64",
        "test_a_token_that_is_not_finite_spreads_only_to_those_that_see_it",
    ],
    "attention/test_tree_attention.py": [
        "test_nodes_longer_than_a_block",
        "test_random_forests_in_16_bits",
        "test_error_is_at_most_twice_that_of_torch",
        "test_sequences_do_not_depend_on_each_other",
        "test_shared_prefixes_change_no_bit_of_the_result",
    ],
    "attention/test_tree_attention_hostile.py": [
        "test_a_token_that_is_not_finite_spreads_only_to_those_that_see_it",
        "test_a_sink_of_minus_infinity_is_none",
        "test_a_large_sink_takes_all_the_weight",
        "test_a_sink_of_nan_reaches_its_own_head_alone",
        "test_large_scores",
    ],
    "test_gemm.py": [],
    "test_linear_recurrence.py": [
        "test_a_forest_against_float64",
        "test_random_forests_against_float64",
        "test_the_bits_of_a_tree_depend_on_itself_alone",
    ],
    "test_causal_conv1d.py": [
        "test_random_forests_against_float64",
        "test_several_tiles_of_channels",
    ],
    "linear/test_product_dtypes.py": [],
    "linear/test_linear_logprob.py": [
        "test_error_is_at_most_twice_that_of_plain_pytorch",
        "test_logits_of_16_bit_inputs_are_not_rounded",
        "test_buffers_do_not_exceed_the_budget",
        "test_main_grad_is_added_to",
        "test_deterministic_rows_do_not_depend_on_other_rows",
        "test_nan_in_inactive_rows_does_not_spread",
    ],
    "linear/test_linear_distillation.py": [
        "test_against_float64",
        "test_16_bit_inputs_over_many_chunks",
        "test_the_error_is_at_most_twice_that_of_torch",
        "test_removed_entries_and_a_student_that_equals_its_teacher",
        "test_an_entry_that_only_the_student_lacks",
    ],
    "linear/test_linear_active_rows.py": [
        "test_inactive_rows_are_left_out_of_the_gradient_products",
        "test_policy_loss_of_16_bit_inputs_over_many_chunks_with_inactive_rows",
        "test_deterministic_policy_loss_rows_do_not_depend_on_other_rows",
    ],
    "linear/test_linear_policy_loss.py": ["test_policy_loss_adds_to_main_grad"],
}
TESTS = [
    f"tests/kernels/{module}" + (f"::{name}" if name else "")
    for module, names in CASES.items()
    for name in names or [""]
]

# Of the kernels that multiply pairs of bfloat16, and of torch's products; all others are the same
# objects under avx512 and avx512_bf16.
PAIRS = tuple(
    f"tests/kernels/{module}"
    for module in ("attention/", "test_decode", "test_gemm", "test_grouped", "linear/test_product")
)


@pytest.mark.slow
@pytest.mark.parametrize(
    "limit", [pytest.param(n, marks=[pytest.mark.exhaustive] * (n == "portable")) for n in LIMITS]
)
def test_kernels_on_a_narrower_instruction_set(limit):
    narrower = list(LIMITS)[: next((i for i, n in enumerate(LIMITS) if n == cpu_isa), None)]
    if limit not in narrower:
        pytest.skip(f"this CPU has {cpu_isa}: all tests run on it")
    tests = [test for test in TESTS if limit != "avx512" or test.startswith(PAIRS)]
    options = ("-q", "-x", "-p", "no:cacheprovider", "-m", "not exhaustive")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, *tests],
        cwd=ROOT,
        env={**os.environ, **LIMITS[limit]},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
