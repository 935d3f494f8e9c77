"""sample_tokens keeps what vLLM's sampler keeps, and has the log-probs that vLLM returns."""

import pytest
import torch

from hybridengine.rollout.vllm.environment import vllm_available
from tests.kernels.sampling.cases import MASS_ERROR, keys, per_row, random_logits
from tests.kernels.sampling.test_sample_tokens import sample

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not vllm_available(), reason="the rollout engine; `make setup` installs it"),
]

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
    k = top_k.where(top_k > 0, logits.shape[1]) if (top_k > 0).any() else None
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
    theirs = vllm_log_probs(logits, *per_row(rows, parameters))
    z = logits.float() / parameters.get("temperature", 1.0)
    for row, ids in enumerate(sampled.kept_ids.long().split(sampled.num_kept.tolist())):
        expected = (theirs[row] > -torch.inf).nonzero().squeeze(1)
        # Of equal logits at the boundary of top-p an unstable sort keeps any.
        same = torch.equal(z[row, ids].sort().values, z[row, expected].sort().values)
        assert same or _at_the_boundary(theirs[row], z[row], ids, expected, parameters)
        if same:
            token = sampled.tokens[row]
            log_p = z[row, ids].double().log_softmax(0)[ids == token]
            torch.testing.assert_close(sampled.log_probs[row : row + 1].double(), log_p)
            if theirs[row, token] > -torch.inf:
                torch.testing.assert_close(sampled.log_probs[row], theirs[row, token])


def _at_the_boundary(theirs, z, ids, expected, parameters):
    """Whether the sets differ by entries at which the cumulative probability is top_p.

    vLLM adds the probabilities of all entries in float32, the smallest first.
    """
    assert "top_p" in parameters
    both = torch.cat([ids, expected]).unique()
    least = max(float(z[ids].min()), float(z[expected].min()))
    near = both[z[both] <= least]
    probability = z.double().softmax(0)[near].sum()
    return float(probability) < len(z) * MASS_ERROR / 10 + 4 * float(probability / len(near))
