"""Supervised fine-tuning on the assistant tokens of conversations.

conversations → packed micro-batches → cross-entropy of the assistant tokens → optimizer step.

The loss is the mean of -log p over all assistant tokens of the global batch (arXiv 2203.02155,
section 3.5), whatever the number of ranks and the split into micro-batches.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from rich.table import Table
from torch import Tensor

from hybridengine.model import PackedBatch, free_gathered, pack_batch, packed_cross_entropy
from hybridengine.run.config import SFTConfig
from hybridengine.run.session import Session
from hybridengine.train.base import BaseTrainer
from hybridengine.train.build import (
    build_data_parallel,
    build_optimizer,
    load_dataset,
    load_model,
    load_tokenizer,
)
from hybridengine.train.data import PromptLoader, SFTDataset, SFTSample
from hybridengine.train.modes import Mode
from hybridengine.train.plan import plan_table


class SFTTrainer(BaseTrainer[SFTConfig]):
    """One rank of an SFT run."""

    data: SFTDataset
    val: SFTDataset | None

    def __init__(self, config: SFTConfig, session: Session, mode: Mode | None = None) -> None:
        super().__init__(config, session, mode)
        config = self.config  # with resolved types
        data, optim = config.data, config.optim
        torch.manual_seed(config.seed + session.rank)  # dropout differs between the ranks
        with session.phase("load_data"):
            self.tokenizer = load_tokenizer(config)
            load = partial(load_dataset, config, self.tokenizer)
            self.data: SFTDataset = load(data.train_files)
            self.val = load(data.val_files) if data.val_files else None
            self.loader = PromptLoader(
                self.data, data.train_batch_size, seed=config.seed, shuffle=data.shuffle
            )
        self.dp = build_data_parallel(config, session, self.choices)
        with session.phase("load_model"):
            self.model = load_model(config, session, is_trained=True)
            self.optimizer = build_optimizer(config, self.model, optim, optim, self.steps)
        self.optimizers = {"train": self.optimizer}
        self.checkpoints = self.build_checkpoints({"actor": (self.model, self.optimizer)}, {})

    def plan(self) -> Table:
        return plan_table(self.config, self.data, self.val, self.choices)

    def collect(self, step: int) -> list[SFTSample]:
        """Return the conversations of one optimizer step, of all ranks."""
        return list(self.loader.next_batch())

    def update(self, step: int, data: Sequence[SFTSample]) -> tuple[dict[str, float], list[int]]:
        """Run one optimizer step; return its metrics and the length of every conversation."""
        num_tokens = sum(sample.num_loss_tokens for sample in data)
        loss, optimizer = torch.zeros((), device=self.session.device), self.optimizer
        grad_scale = self.dp.grad_scale(optimizer)

        def loss_of(batch: PackedBatch) -> tuple[Tensor, None]:
            part = packed_cross_entropy(self.model, batch, num_tokens, grad_scale)
            part = part * (not batch.is_dummy)
            loss.add_(part.detach())
            return part, None

        with self.session.phase("update_actor"):
            self.model.train()
            micro_batches, max_norm = list(self._micro_batches(data)), self.config.optim.clip_grad
            norm, of_hooks = self.dp.optimizer_step(
                self.model, optimizer, micro_batches, loss_of, max_norm
            )
            total = self._sum_over_ranks(loss)
        self.saved = self.dp.sum_saved(batch.saved for batch in micro_batches)
        return {
            "train/loss": total,
            "train/grad_norm": float(norm),
            "train/lr": optimizer.last_lr,
            "train/num_targets": num_tokens,
            **{name: float(value) for name, value in of_hooks.items()},
        }, [len(sample.ids) for sample in data]

    @torch.no_grad()
    def validate(self, step: int) -> tuple[float, dict[str, float]]:
        assert self.val is not None
        loss = self.loss_of(self.val)
        return -loss, {"val/loss": loss}

    @torch.no_grad()
    def loss_of(self, data: SFTDataset) -> float:
        """Compute the mean of -log p over all assistant tokens of `data`."""
        size, total = self.config.data.train_batch_size, 0.0
        self.model.eval()
        for start in range(0, len(data), size):
            loss = torch.zeros((), device=self.session.device)
            for batch in self._micro_batches(data[start : start + size]):
                loss += packed_cross_entropy(self.model, batch, 1) * (not batch.is_dummy)
            total += self._sum_over_ranks(loss)
        free_gathered(self.model)
        return total / sum(sample.num_loss_tokens for sample in data)

    def summary(self) -> dict[str, Any]:
        names = ("train/loss", "val/loss", "perf/throughput", "perf/mfu/actor")
        return {name: self.report.last[name] for name in names if name in self.report.last}

    def _micro_batches(self, samples: Sequence[SFTSample]) -> Iterator[PackedBatch]:
        """Pack this rank's share of `samples`."""
        data, dp = self.config.data, self.dp
        lengths, limit = [len(s.ids) for s in samples], data.max_token_len_per_gpu * dp.sp_size
        starts = [s.loss_mask.index(1) if 1 in s.loss_mask else len(s.ids) for s in samples]
        prompts: list[tuple[Any, int]] = [
            ((tuple(s.ids[:n]), tuple(image.sha256 for image in s.images)), n)
            for s, n in zip(samples, starts, strict=True)
        ]
        if data.micro_batch_size_per_gpu is not None:
            lengths, limit = [1] * len(samples), data.micro_batch_size_per_gpu
            prompts = [(prompt, 0) for prompt, _ in prompts]
        shortest = [lengths.index(min(lengths))]  # of dummy micro-batches
        for rows in dp.micro_batches(lengths, limit, prompts)[dp.replica]:
            chosen = [samples[i] for i in rows or shortest]
            ids, loss_masks = [s.ids for s in chosen], [s.loss_mask for s in chosen]
            packed = pack_batch(
                ids,
                loss_masks,
                self.session.device,
                dp.sp_group,
                shared_prefix=dp.shared_prefix,
                parts={} if dp.preparer is None else dp.preparer.parts([s.images for s in chosen]),
            )
            yield packed if rows else packed.as_dummy()

    def _sum_over_ranks(self, value: Tensor) -> float:
        dist.all_reduce(value)
        return float(value)
