"""sample_tokens keeps what vLLM's sampler keeps, and has the log-probs that vLLM returns."""

import pytest
import torch

from hybridengine.engine.vllm.environment import vllm_available
from tests.kernels.sampling.cases import keys, per_row, random_logits, sample

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not vllm_available(), reason="the rollout engine; `make setup` installs it"),
]

CUMSUM_ERROR = 1e-5  # vLLM adds the probabilities in float32, the smallest first

PARAMETERS = (
    {"top_k": 1},
    {"top_k": 40, "temperature": 0.7},
    {"top_p": 0.9},
    {"top_p": 0.3, "temperature": 1.3},
    {"top_k": 60, "top_p": 0.95},
    {"min_p": 0.05},
    {"min_p": 0.01, "top_k": 100, "top_p": 0.8, "temperature": 0.6},
)


def vllm_log_probs(logits, temperature, top_k, top_p, min_p):
    """Return the processed log-probs of vLLM's first model runner: [B, V], -inf where cut."""
    from vllm.v1.sample.logits_processor.builtin import MinPLogitsProcessor
    from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p_pytorch
    from vllm.v1.sample.sampler import Sampler

    logits = Sampler.apply_temperature(logits.float().clone(), temperature, True)
    if (min_p > 0).any():
        processor = MinPLogitsProcessor.__new__(MinPLogitsProcessor)
        processor.min_p_count, processor.min_p = len(min_p), min_p.unsqueeze(1)
        logits = processor.apply(logits)
    vocab = logits.shape[1]
    k = top_k.where(top_k > 0, vocab).clamp(max=vocab) if (top_k > 0).any() else None
    p = top_p if (top_p < 1).any() else None
    return Sampler.compute_logprobs(apply_top_k_top_p_pytorch(logits, k, p, allow_cpu_sync=True))


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
@pytest.mark.parametrize("parameters", PARAMETERS, ids=str)
@pytest.mark.parametrize("vocab", (50, 2000, 49_152))
def test_kept_entries_and_log_probs(parameters, vocab, dtype):
    rows = 6
    logits = random_logits(rows, vocab, vocab + 1).to(dtype)
    if dtype == torch.float32:
        logits[1] = logits[1].round()  # ties
    sampled = sample(logits, *keys(rows), **parameters)
    numbers = per_row(rows, parameters)
    theirs = vllm_log_probs(logits, *numbers)
    before_top_p = vllm_log_probs(logits, *numbers[:2], torch.ones(rows), numbers[3])
    for row, ids in enumerate(sampled.kept_ids.long().split(sampled.num_kept.tolist())):
        z, p = before_top_p[row], float(numbers[2][row])
        expected = (theirs[row] > -torch.inf).nonzero().squeeze(1)
        first, last = sorted((len(ids), len(expected)))
        if first == last:  # of equal logits at the boundary of top-p an unstable sort keeps any
            assert torch.equal(z[ids].sort().values, z[expected].sort().values)
        else:
            preceding = (
                z.exp().double().sort(descending=True).values.cumsum(0)[first - 1 : last - 1]
            )
            assert ((preceding - p).abs() < CUMSUM_ERROR).all()
        if torch.equal(ids, expected):
            torch.testing.assert_close(sampled.log_probs[row], theirs[row, sampled.tokens[row]])
