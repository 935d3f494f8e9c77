"""Supervised fine-tuning: the model learns to say what the assistant says in given conversations.

conversations → packed micro-batches → log-probs of the targets → loss and optimizer.

The loss is the mean of -log p over all targets of the global batch (arXiv 2203.02155, section 3.5),
whatever the number of ranks and the split into micro-batches.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from rich.table import Table
from torch import Tensor

from hybridengine.config import SFTConfig
from hybridengine.data import PromptLoader
from hybridengine.data.sft import SFTDataset, SFTSample
from hybridengine.model import PackedBatch, packed_log_probs
from hybridengine.model.forward import pack_targets
from hybridengine.runtime import Session, run_rank
from hybridengine.trainer.batching import split_micro_batches
from hybridengine.trainer.job import Job
from hybridengine.trainer.plan import sft_plan
from hybridengine.trainer.precision import resolve_dtypes
from hybridengine.trainer.setup import build_optimizer, load_model, load_tokenizer

__all__ = ["load_sft_data", "train_sft"]


def train_sft(config: SFTConfig) -> bool:
    """Run one rank of an SFT job; under torchrun, or started by `hybridengine sft`.

    Returns whether it has finished; False: a signal stopped it after a checkpoint.
    """
    trainer = config.trainer
    return run_rank(lambda s: _Run(config, s).train(), trainer.default_local_dir, trainer.timeout_s)


def load_sft_data(config: SFTConfig) -> tuple[Any, SFTDataset, SFTDataset | None]:
    """Tokenizer, training and validation conversations (None where there are none)."""
    tokenizer, data = load_tokenizer(config), config.data
    val = SFTDataset(data.val_files, tokenizer, data) if data.val_files else None
    return tokenizer, SFTDataset(data.train_files, tokenizer, data), val


class _Run(Job):
    """Everything one rank holds during a job."""

    def __init__(self, config: SFTConfig, session: Session) -> None:
        config = resolve_dtypes(config)
        super().__init__(config, session)
        self.config, data, fsdp = config, config.data, config.model.fsdp_config
        torch.manual_seed(config.seed + session.rank)  # dropout differs between the ranks
        with session.phase("load_data"):
            self.tokenizer, self.data, self.val = load_sft_data(config)
            self.loader = PromptLoader(
                self.data, data.train_batch_size, seed=config.seed, shuffle=data.shuffle
            )
        self.shared = config.sequence_parallel_size
        self.group = dist.new_subgroups(self.shared)[0] if self.shared > 1 else None
        with session.phase("load_model"):
            self.model = load_model(config, session, adapters=True, cpu_offload=fsdp.offload_policy)
            optim = config.optim
            self.optimizer = build_optimizer(config, self.model, optim, optim, self.steps)
        self.optimizers = {"train": self.optimizer}
        self.checkpoints = self.build_checkpoints({"actor": (self.model, self.optimizer)}, {})

    def plan(self) -> Table:
        return sft_plan(self.config, self.data, self.val)

    def step(self, step: int) -> tuple[dict[str, float], list[int]]:
        samples = self.loader.next_batch()
        targets = sum(sample.num_targets for sample in samples)
        loss = torch.zeros((), device=self.session.device)
        with self.session.phase("update_actor"):
            self.model.train()
            for batch, counted in self._micro_batches(samples):
                part = self._sum_of_losses(batch) * counted / targets
                # FSDP2 averages gradients over the ranks; the loss is already a global mean.
                (part * self.session.world_size * self.optimizer.loss_scale).backward()
                loss += part.detach()
            norm = self.optimizer.step(self.config.optim.clip_grad)
            total = self._sum_over_ranks(loss)
        return {
            "train/loss": total,
            "train/grad_norm": float(norm),
            "train/lr": self.optimizer.last_lr,
            "train/num_targets": targets,
        }, [len(sample.ids) for sample in samples]

    @torch.no_grad()
    def validate(self, step: int) -> tuple[float, dict[str, float]]:
        assert self.val is not None
        loss = self.loss_of(self.val)
        return -loss, {"val/loss": loss}

    @torch.no_grad()
    def loss_of(self, data: SFTDataset) -> float:
        """Mean of -log p over every target of `data`."""
        size, total = self.config.data.train_batch_size, 0.0
        self.model.eval()
        for start in range(0, len(data), size):
            loss = torch.zeros((), device=self.session.device)
            for batch, counted in self._micro_batches(data[start : start + size]):
                loss += self._sum_of_losses(batch) * counted
            total += self._sum_over_ranks(loss)
        return total / sum(sample.num_targets for sample in data)

    def summary(self) -> dict[str, Any]:
        names = ("train/loss", "val/loss", "perf/throughput", "perf/mfu/actor")
        return {name: self.report.last[name] for name in names if name in self.report.last}

    def _micro_batches(self, samples: Sequence[SFTSample]) -> Iterator[tuple[PackedBatch, bool]]:
        """This rank's share of `samples`, packed; and whether it counts, see `MicroBatch`."""
        data, replicas = self.config.data, self.config.data_parallel_size
        lengths, most = [len(s.ids) for s in samples], data.max_token_len_per_gpu * self.shared
        if data.micro_batch_size_per_gpu is not None:
            lengths, most = [1] * len(samples), data.micro_batch_size_per_gpu
        split = split_micro_batches(lengths, replicas, most)
        for micro in split[self.session.rank // self.shared]:
            chosen = [samples[i] for i in micro.indices]
            ids, targets = [s.ids for s in chosen], [s.is_target for s in chosen]
            yield pack_targets(ids, targets, self.session.device, self.group), micro.counted

    def _sum_of_losses(self, batch: PackedBatch) -> Tensor:
        return -packed_log_probs(self.model, batch)[0].sum()

    def _sum_over_ranks(self, value: Tensor) -> float:
        dist.all_reduce(value)
        return float(value) / self.shared  # ranks that share a micro-batch each hold all its loss
