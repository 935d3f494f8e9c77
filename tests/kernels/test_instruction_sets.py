"""The narrower CPU paths pass what the machine's widest one passes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.isa import LIMITS

ROOT = Path(__file__).parent.parent.parent
FILES = [
    "policy_loss",
    "packing",
    "advantage",
    "logprob",
    "logprob_hostile",
    "mixed_product",
    "product_paths",
    "linear_logprob",
    "linear_policy_loss",
]
CASES = (
    "every_mode_and_aggregation or random_batches or go_around_the_caches or "
    "survives_both_ways or equals_the_reference or "
    "at_most_twice or led_rows or removed or goes_to_one or does_not_matter or unaligned or "
    "mixed_product or product_paths or 16_bit or error_is_at_most or main_grad or dead_rows or "
    "keep_to_the_budget or deterministic"
)
ENVIRONMENTS = LIMITS | {"avx512 without bfloat16": {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE"}}


@pytest.mark.parametrize("limit", ENVIRONMENTS)
def test_kernels_on_a_narrower_instruction_set(limit):
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-k", CASES),
            *(f"tests/kernels/test_{name}.py" for name in FILES),
        ],
        cwd=ROOT,
        env={**os.environ, **ENVIRONMENTS[limit]},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
