"""`FusedSecondSampler`: the sampler of vLLM's second model runner, with states on a CPU."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("vllm", reason="the rollout engine; `make setup` installs it")

from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p
from vllm.v1.worker.gpu.sample import sampler as vllm_sampler

from hybridengine.engine.vllm.sampling import FusedSecondSampler, fuse_sampler
from hybridengine.kernels import sample_tokens, token_log_probs

VOCAB = 700
ROWS = [2, 0, 3]  # of the states, by request of the batch
TEMPERATURE, TOP_K, TOP_P = [0.7, 9.0, 1.3, 0.0], [5, 1, VOCAB, VOCAB], [1.0, 0.1, 0.8, 1.0]


class States:
    """vLLM's `SamplingStates` without memory that a GPU reads."""

    def __init__(self, num_logprobs: int) -> None:
        self._num_logprobs = num_logprobs
        self.temperature = SimpleNamespace(gpu=torch.tensor(TEMPERATURE))
        self.seeds = SimpleNamespace(gpu=torch.tensor([11, 12, -(2**62), 14]))
        self.top_k, self.top_p = torch.tensor(TOP_K, dtype=torch.int32), torch.tensor(TOP_P)

    def max_num_logprobs(self, rows: Any) -> int:
        return self._num_logprobs

    def apply_temperature(self, logits: torch.Tensor, mapping: Any, rows: Any) -> None:
        temperature = self.temperature.gpu[mapping]
        logits /= torch.where(temperature > 0, temperature, 1.0).unsqueeze(1)

    def apply_min_p(self, *args: Any) -> None: ...

    def any_greedy(self, rows: Any) -> bool:
        return bool((self.temperature.gpu[rows] == 0).any())

    def get_top_k_top_p(self, mapping: Any, rows: Any) -> Any:
        return self.top_k[mapping], self.top_p[mapping]


def sampler_of(num_logprobs: int = 0, exact: bool = False, **changes: Any) -> Any:
    sampler = object.__new__(vllm_sampler.Sampler)
    state: dict[str, Any] = {
        "logprobs_mode": "processed_logprobs",
        "compute_nans": False,
        "req_states": SimpleNamespace(prefill_len=SimpleNamespace(gpu=None)),
        "sampling_states": States(num_logprobs),
        "logits_processors": [],
        "logprob_token_ids_state": SimpleNamespace(max_num_token_ids=lambda rows: 0),
        "thinking_budget_state": SimpleNamespace(apply=lambda *args: None),
        "trace_replay_state": None,
        "needs_logits_processing": np.ones(4, bool),
        "return_sampling_mask": False,
        "use_flashinfer": False,
        "use_xpu_sampler": False,
        "use_fp64_gumbel": False,
    }
    vars(sampler).update(state | changes)
    runner = SimpleNamespace(sampler=sampler)
    fuse_sampler(runner, exact)
    assert isinstance(runner.sampler, FusedSecondSampler)
    return sampler


@pytest.fixture
def batch(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    monkeypatch.setattr(vllm_sampler, "get_num_sampled_and_rejected", lambda *args: (1, 0))
    num = len(ROWS)
    return SimpleNamespace(
        num_reqs=num,
        expanded_idx_mapping=torch.tensor(ROWS),
        idx_mapping=torch.tensor(ROWS),
        idx_mapping_np=np.array(ROWS),
        cu_num_logits_np=np.arange(num + 1),
        cu_num_logits=torch.arange(num + 1),
        expanded_local_pos=torch.zeros(num, dtype=torch.int64),
        positions=torch.tensor([0, 7, 0, 8, 9]),
        input_ids=torch.zeros(5, dtype=torch.int64),
        logits_indices=torch.tensor([1, 3, 4]),
        seq_lens=torch.tensor([8, 9, 10]),
        seq_lens_cpu_upper_bound=torch.tensor([8, 9, 10]),
    )


def random_logits() -> torch.Tensor:
    return torch.randn(len(ROWS), VOCAB, generator=torch.Generator().manual_seed(0)) * 2


def test_tokens_and_log_probs_of_each_request(batch: SimpleNamespace) -> None:
    sampler, logits = sampler_of(), random_logits()
    output = sampler(logits.clone(), batch)
    tokens = output.sampled_token_ids[:, 0]
    temperature = torch.tensor(TEMPERATURE)[ROWS]
    keys = sampler.sampling_states.seeds.gpu[ROWS], torch.tensor([7, 8, 9])
    limits = {"top_k": torch.tensor(TOP_K)[ROWS], "top_p": torch.tensor(TOP_P)[ROWS]}
    alone = sample_tokens(logits, *keys, temperature=temperature, **limits)
    assert torch.equal(tokens, alone.tokens) and tokens[2] == logits[2].argmax()
    scaled = logits / torch.where(temperature > 0, temperature, 1.0)[:, None]
    log_probs = apply_top_k_top_p(scaled, *limits.values()).log_softmax(-1)
    expected = log_probs.gather(1, tokens[:, None])
    torch.testing.assert_close(output.logprobs_tensors.logprobs, expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(output.logprobs_tensors.logprob_token_ids[:, 0].long(), tokens)
    ranks = (log_probs >= expected).sum(1)
    assert torch.equal(output.logprobs_tensors.selected_token_ranks, ranks)
    again = sampler(logits.clone(), batch)
    assert torch.equal(again.sampled_token_ids, output.sampled_token_ids)


def test_exact_log_probs_are_those_of_the_logits(batch: SimpleNamespace) -> None:
    """Not of logits that were divided by the temperature and rounded."""
    sampler, logits = sampler_of(exact=True), random_logits()
    temperatures = torch.tensor([0.7, 9.0, 1.3, 0.9])
    sampler.sampling_states.temperature.gpu = temperatures
    output = sampler(logits.clone(), batch)
    tokens = output.sampled_token_ids[:, 0]
    expected, _ = token_log_probs(logits, tokens, temperatures[ROWS])
    assert torch.equal(output.logprobs_tensors.logprobs[:, 0], expected)
    assert torch.equal(tokens, sampled_by(sampler, logits, batch))


def sampled_by(sampler: Any, logits: torch.Tensor, batch: SimpleNamespace) -> torch.Tensor:
    sampler.is_exact = False
    return sampler(logits.clone(), batch).sampled_token_ids[:, 0]


@pytest.mark.parametrize(
    ("num_logprobs", "changes"),
    [
        (3, {}),
        (0, {"return_sampling_mask": True}),
        (0, {"logprobs_mode": "raw_logprobs"}),
        (0, {"trace_replay_state": SimpleNamespace(apply_trace=lambda *args: None)}),
    ],
)
def test_the_rest_is_vllms(
    batch: SimpleNamespace,
    monkeypatch: pytest.MonkeyPatch,
    num_logprobs: int,
    changes: dict[str, Any],
) -> None:
    drawn, scored = torch.tensor([4, 5, 6]), object()
    monkeypatch.setattr(vllm_sampler, "gumbel_sample", lambda *args, **options: drawn)
    monkeypatch.setattr(vllm_sampler, "compute_topk_scores", lambda *args, **options: scored)
    monkeypatch.setattr(
        vllm_sampler, "SamplingMaskTensors", SimpleNamespace(from_logits=lambda *args: None)
    )
    sampler = sampler_of(num_logprobs, **changes)
    sampler.sampling_states.top_k = SimpleNamespace(np=np.array(TOP_K))
    sampler.sampling_states.get_top_k_top_p = lambda *args: (None, None)
    output = sampler(random_logits(), batch)
    assert torch.equal(output.sampled_token_ids[:, 0], drawn)
    assert output.logprobs_tensors is scored


def test_without_log_probs_there_are_none(batch: SimpleNamespace) -> None:
    output = sampler_of(num_logprobs=-1, logprobs_mode="raw_logprobs")(random_logits(), batch)
    assert output.logprobs_tensors is None
    with_them = sampler_of()(random_logits(), batch)
    assert torch.equal(output.sampled_token_ids, with_them.sampled_token_ids)
