"""rollout_metrics against its formulas in plain Python, sequence by sequence."""

import math
import statistics

import pytest
import torch

from hybridengine.kernels import rollout_metrics
from tests.kernels.batches import batch, sequences

UPPER = 1.4


def expected(inputs, level, lower):
    rows = [(where, xs) for where, xs in sequences(inputs) if xs]
    old, rollout = (
        [statistics.fmean(inputs[name][where].tolist()) for where, _ in rows]
        for name in ("old_log_probs", "ref_log_probs")
    )
    differences = [b - a for a, b in zip(old, rollout, strict=True)]
    raw = [
        [math.exp(sum(xs))] * len(xs) if level == "sequence" else [math.exp(x) for x in xs]
        for _, xs in rows
    ]
    low = 1 / UPPER if lower is None else lower
    bounded = [
        [min(w, UPPER) if lower is None else w * (lower <= w <= UPPER) for w in row] for row in raw
    ]
    weights = [w for row in bounded for w in row]
    means = [statistics.fmean(row) for row in bounded]
    raw_means = [statistics.fmean(row) for row in raw]
    over = raw_means if level == "sequence" else [w for row in raw for w in row]
    shown = [w for row in (raw if level == "sequence" else bounded) for w in row]
    square = statistics.fmean(w * w for w in weights)
    return {
        "training_ppl": statistics.fmean(math.exp(-x) for x in old),
        "training_log_ppl": -statistics.fmean(old),
        "rollout_ppl": statistics.fmean(math.exp(-x) for x in rollout),
        "rollout_log_ppl": -statistics.fmean(rollout),
        "ppl_ratio": statistics.fmean(map(math.exp, differences)),
        "log_ppl_diff": statistics.fmean(differences),
        "log_ppl_abs_diff": statistics.fmean(map(abs, differences)),
        "log_ppl_diff_max": max(differences),
        "log_ppl_diff_min": min(differences),
        "chi2_seq": statistics.fmean(math.exp(2 * sum(xs)) - 1 for _, xs in rows),
        "rollout_is_mean": statistics.fmean(weights),
        "rollout_is_std": statistics.pstdev(weights),
        "rollout_is_max": max(shown),
        "rollout_is_min": min(shown),
        "rollout_is_eff_sample_size": statistics.fmean(weights) ** 2 / square,
        "rollout_is_ratio_fraction_high": statistics.fmean(w > UPPER for w in over),
        "rollout_is_ratio_fraction_low": statistics.fmean(w < low for w in over),
        "rollout_is_seq_mean": statistics.fmean(means),
        "rollout_is_seq_std": statistics.stdev(means),
        "rollout_is_seq_max": max(means),
        "rollout_is_seq_min": min(means),
        "rollout_is_seq_max_deviation": max(abs(m - 1) for m in means),
        "rollout_is_seq_fraction_high": statistics.fmean(m > UPPER for m in raw_means),
        "rollout_is_seq_fraction_low": statistics.fmean(m < low for m in raw_means),
    }


@pytest.mark.parametrize("lower", [None, 0.6])
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_against_the_formulas(level, lower):
    inputs = batch([5, 0, 9, 1, 14], dtype=torch.float64)
    want = expected(inputs, level, lower)
    spoiled = inputs["ref_log_probs"].masked_fill(~inputs["response_mask"], math.nan)
    arguments = inputs["old_log_probs"], spoiled
    options = {name: inputs[name] for name in ("cu_seqlens", "response_mask")}
    got = rollout_metrics(
        *arguments, rollout_is=level, rollout_is_threshold=UPPER, rollout_is_lower=lower, **options
    )
    assert got.keys() == want.keys()
    for name, value in got.items():
        assert value.item() == pytest.approx(want[name], rel=1e-9, abs=1e-12), name
    short = rollout_metrics(*arguments, **options)
    assert short.keys() == {name for name in want if not name.startswith("rollout_is")}


def test_nothing_and_errors():
    none = torch.zeros(0)
    got = rollout_metrics(none, none, cu_seqlens=torch.tensor([0]), rollout_is="token")
    assert got["training_ppl"].isnan() and got["rollout_is_mean"].isnan()
    with pytest.raises(ValueError, match="old_log_probs is \\[T\\]; give cu_seqlens"):
        rollout_metrics(none, none)
    with pytest.raises(ValueError, match="rollout_is is 'geometric'"):
        rollout_metrics(none[None], none[None], rollout_is="geometric")
