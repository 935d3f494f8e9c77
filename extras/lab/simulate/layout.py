"""A layout of the ranks, and the work of a step."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from hybridengine.lab.simulate.config import Mode, WorkloadConfig


@dataclass(frozen=True)
class Layout:
    """How ranks train and generate.

    mode: in "sync" all ranks do both, one after the other (colocated); in "one_step_off" the first
      `trainer_ranks` train while the others generate the next batch.
    critic_ranks: how many of the trainer ranks hold only the critic; 0 if actor and critic share
      all trainer ranks.
    The other fields are explained in docs/training.md.
    """

    mode: Mode
    trainer_ranks: int
    engine_ranks: int
    fsdp_size: int
    tp_size: int
    sequence_parallel: int = 1
    critic_ranks: int = 0
    gradient_checkpointing: bool = False
    reshard_after_forward: bool = True
    offload: bool = False
    expert_parallel: int = 1
    share_engine_weights: bool = False

    @property
    def is_split(self) -> bool:
        return self.mode == "one_step_off"

    @property
    def actor_ranks(self) -> int:
        """Ranks that train the policy."""
        return self.trainer_ranks - self.critic_ranks

    @property
    def num_engines(self) -> int:
        return self.engine_ranks // self.tp_size

    @property
    def replicas(self) -> int:
        """Copies of the policy's weights (HSDP)."""
        return self.actor_ranks // self.fsdp_size


@dataclass(frozen=True)
class Workload:
    """The work of a step: a checked configuration, and what follows from it."""

    config: WorkloadConfig

    @property
    def num_responses(self) -> int:
        return self.config.prompts * self.config.n

    @property
    def train_itemsize(self) -> int:
        return getattr(torch, self.config.dtype).itemsize

    @property
    def engine_itemsize(self) -> int:
        return getattr(torch, self.config.engine_dtype).itemsize

    @cached_property
    def lengths(self) -> np.ndarray:
        """Response lengths of the step, int64 [responses], in a fixed random order.

        Quantiles of the observed lengths or, from a mean and a maximum, of the distribution of
        largest entropy with this mean on [1, max]: a truncated exponential.
        """
        config = self.config
        quantiles = (np.arange(self.num_responses) + 0.5) / self.num_responses
        if config.response_lengths:
            ordered = np.sort(np.array(config.response_lengths))
            lengths = ordered[(quantiles * len(ordered)).astype(np.int64)]
        else:
            lengths = truncated_exponential(
                quantiles, config.response_length, config.max_response_length
            )
        return np.random.default_rng(0).permutation(np.rint(lengths).astype(np.int64))

    @cached_property
    def response_tokens(self) -> int:
        return int(self.lengths.sum())

    @cached_property
    def tokens(self) -> float:
        """Tokens of all sequences of the step, each with its prompt."""
        return self.response_tokens + self.num_responses * self.config.prompt_length

    @cached_property
    def trained_tokens(self) -> float:
        """Tokens that the trainer computes: a shared prompt counts once for its group."""
        prompts = self.config.prompts if self.config.shared_prefix else self.num_responses
        return self.response_tokens + prompts * self.config.prompt_length

    @cached_property
    def trained_pairs(self) -> float:
        """Pairs (token, key that it attends to) that the trainer computes."""
        prompt, lengths = self.config.prompt_length, self.lengths.astype(np.float64)
        prompts = self.config.prompts if self.config.shared_prefix else self.num_responses
        of_responses = (lengths * prompt + lengths * (lengths + 1) / 2).sum()
        return float(of_responses + prompts * prompt * (prompt + 1) / 2)

    @cached_property
    def longest_sequence(self) -> float:
        return self.config.prompt_length + float(self.lengths.max())

    @property
    def optimizer_steps(self) -> int:
        return self.config.mini_batches * self.config.ppo_epochs

    def tokens_per_micro_batch(self, ranks: int, sequence_parallel: int) -> tuple[float, int]:
        """Return (tokens of a micro-batch on a rank, micro-batches of an optimizer step)."""
        replicas = ranks // sequence_parallel
        per_rank = self.trained_tokens / self.config.mini_batches / replicas / sequence_parallel
        limit = max(self.config.max_tokens_per_gpu, self.longest_sequence / sequence_parallel)
        count = max(1, math.ceil(per_rank / limit))
        return per_rank / count, count


def truncated_exponential(quantiles: np.ndarray, mean: float, maximum: float) -> np.ndarray:
    """Return quantiles of the density c exp(r x) on [1, maximum] with this mean."""
    span = maximum - 1.0
    target = (min(max(mean, 1.0), maximum) - 1.0) / span if span else 0.0
    if not span or target <= 0 or target >= 1:
        return np.full_like(quantiles, mean)

    def mean_of(rate: float) -> float:  # on [0, 1]
        return 0.5 + rate / 12 if abs(rate) < 1e-4 else 1 / -np.expm1(-rate) - 1 / rate

    low, high = -500.0, 500.0
    for _ in range(100):
        rate = (low + high) / 2
        low, high = (rate, high) if mean_of(rate) < target else (low, rate)
    if abs(rate) < 1e-4:
        return 1 + span * quantiles
    if rate > 0:  # exp(-rate) instead of exp(rate): no overflow
        x = 1 + np.log(quantiles + (1 - quantiles) * np.exp(-rate)) / rate
    else:
        x = np.log1p(quantiles * np.expm1(rate)) / rate
    return 1 + span * x
