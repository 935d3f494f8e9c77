"""Supervised fine-tuning: the model learns to say what the assistant says in given conversations.

conversations → packed micro-batches → log-probs of the targets → loss and optimizer.

The loss is the mean of -log p over all targets of the global batch (arXiv 2203.02155, section 3.5),
whatever the number of ranks and the split into micro-batches.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedModel

from hybridengine.checkpoint import Checkpointer
from hybridengine.config import SFTConfig, config_to_yaml
from hybridengine.data import PromptLoader
from hybridengine.data.sft import SFTDataset, SFTSample
from hybridengine.distributed import Session, run_rank
from hybridengine.model import (
    Optimizer,
    PackedBatch,
    load_causal_lm,
    packed_log_probs,
    save_pretrained,
    sharding_mesh,
)
from hybridengine.model.export import save_description
from hybridengine.model.forward import pack_targets
from hybridengine.model.lora import apply_lora, save_adapter
from hybridengine.tracking import (
    FlopCounter,
    MetricsLogger,
    Progress,
    performance_metrics,
    write_summary,
)
from hybridengine.trainer.batching import split_micro_batches

__all__ = ["load_sft_data", "sft_plan", "train_sft"]


def train_sft(config: SFTConfig) -> None:
    """Run one rank of an SFT job; under torchrun, or started by `hybridengine sft`."""
    run_rank(
        lambda session: _Run(config, session).train(),
        config.trainer.default_local_dir,
        config.trainer.timeout_s,
    )


def load_sft_data(config: SFTConfig) -> tuple[object, SFTDataset, SFTDataset | None]:
    """Tokenizer, training and validation conversations (None where there are none)."""
    model, data = config.model, config.data
    tokenizer = AutoTokenizer.from_pretrained(model.path, trust_remote_code=model.trust_remote_code)
    val = SFTDataset(data.val_files, tokenizer, data) if data.val_files else None
    return tokenizer, SFTDataset(data.train_files, tokenizer, data), val


def sft_plan(config: SFTConfig, train: SFTDataset, val: SFTDataset | None) -> Table:
    """What the run is going to do, in numbers."""
    data, trainer = config.data, config.trainer
    per_epoch = len(train) // data.train_batch_size
    tokens, learnt = sum(len(s.ids) for s in train), sum(s.num_targets for s in train)
    micro = (
        f"{data.micro_batch_size_per_gpu} conversations"
        if data.micro_batch_size_per_gpu
        else f"up to {data.max_token_len_per_gpu} tokens"
    )
    rows = {
        "model": config.model.path,
        "ranks": f"{config.world_size}, {config.data_parallel_size} data parallel",
        "training": f"{len(train)} conversations, {tokens} tokens, {learnt} of them learnt",
        "validation": f"{len(val)} conversations" if val is not None else "none",
        "steps": f"{per_epoch} per epoch, {_total_steps(config, per_epoch)} in all, "
        f"{data.train_batch_size} conversations each",
        "micro-batch": f"{micro} per rank",
        "written to": trainer.default_local_dir,
    }
    table = Table(show_header=False, box=None, pad_edge=False)
    for name, value in rows.items():
        table.add_row(f"[bold]{name}", value)
    return table


def _total_steps(config: SFTConfig, per_epoch: int) -> int:
    return config.trainer.total_training_steps or config.trainer.total_epochs * per_epoch


class _Run:
    """Everything one rank holds during a job."""

    def __init__(self, config: SFTConfig, session: Session) -> None:
        self.started = time.perf_counter()
        self.config, self.session = config, session
        self.dir = Path(config.trainer.default_local_dir)
        torch.manual_seed(config.seed + session.rank)  # dropout differs between the ranks
        with session.phase("load_data"):
            self.tokenizer, self.data, self.val = load_sft_data(config)
            batch = config.data.train_batch_size
            self.loader = PromptLoader(
                self.data, batch, seed=config.seed, shuffle=config.data.shuffle
            )
        self.steps = _total_steps(config, len(self.loader))
        self.shared = config.ulysses_sequence_parallel_size
        self.group = dist.new_subgroups(self.shared)[0] if self.shared > 1 else None
        with session.phase("load_model"):
            self.model = self._load_model()
            self.optimizer = self._make_optimizer()
        self.flops = FlopCounter(self.model, session.device, session.world_size)
        self.checkpoints = Checkpointer(
            self.dir,
            {"actor": (self.model, self.optimizer)},
            {"loader": self.loader},
            keep=config.trainer.max_actor_ckpt_to_keep,
        )

    def _load_model(self) -> torch.nn.Module:
        model, fsdp = self.config.model, self.config.model.fsdp_config
        return load_causal_lm(
            model.path,
            mesh=sharding_mesh(self.session.device.type, self.session.world_size, fsdp.fsdp_size),
            shard_dim1=lambda name: False,
            param_dtype=getattr(torch, fsdp.dtype),
            gradient_checkpointing=model.enable_gradient_checkpointing,
            use_fused_kernels=model.use_fused_kernels,
            trust_remote_code=model.trust_remote_code,
            reshard_after_forward=fsdp.reshard_after_forward,
            forward_prefetch=fsdp.forward_prefetch,
            min_num_params=fsdp.wrap_policy.min_num_params,
            cpu_offload=fsdp.offload_policy,
            adapt=self._adapt if model.lora_rank else None,
        )

    def _adapt(self, model: PreTrainedModel) -> None:
        chosen = self.config.model
        apply_lora(model, chosen.lora_rank, chosen.lora_alpha, chosen.target_modules)

    def _make_optimizer(self) -> Optimizer:
        optim, fsdp = self.config.optim, self.config.model.fsdp_config
        return Optimizer(
            self.model,
            lr=optim.lr,
            betas=optim.betas,
            weight_decay=optim.weight_decay,
            schedule=optim.lr_scheduler_type,
            warmup_steps=self.config.warmup_steps(self.steps),
            total_steps=self.steps,
            param_dtype=getattr(torch, fsdp.dtype),
            offload=fsdp.optimizer_offload,
        )

    def train(self) -> None:
        trainer, session = self.config.trainer, self.session
        with session.phase("resume"):
            first = self.checkpoints.resume(trainer.resume_mode, trainer.resume_from_path)
        with _Report(self.config, session, self.steps, first) as report:
            report.say(sft_plan(self.config, self.data, self.val))
            if first:
                report.say(f"resumed after step {first}")
            if self.val is not None and trainer.val_before_train and not first:
                report.log(0, {"val/loss": self._loss_of(self.val)})
            for step in range(first + 1, self.steps + 1):
                session.step = step
                last, score = step == self.steps, None
                metrics = self._step(step)
                if self.val is not None and (last or _due(step, trainer.test_freq)):
                    metrics["val/loss"] = self._loss_of(self.val)
                    score = -metrics["val/loss"]
                if trainer.save_freq > 0 and (last or _due(step, trainer.save_freq)):
                    self._save(step, score)
                timings = {f"timing_s/{name}": t for name, t in session.take_timings().items()}
                report.log(step, metrics | timings)
                self.checkpoints.check()
            with session.phase("save_checkpoint"):
                save_pretrained(self.model, self.tokenizer, self.dir / "final")
                if self.config.model.lora_rank:
                    save_adapter(self.model, self.dir / "final_adapter")
                self.checkpoints.wait()
            report.finish(round(time.perf_counter() - self.started, 1))
        dist.barrier()

    def _step(self, step: int) -> dict[str, float]:
        started = time.perf_counter()
        epoch = self.loader.epoch
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
        seconds = time.perf_counter() - started
        lengths = [len(sample.ids) for sample in samples]
        return {
            "train/loss": total,
            "train/grad_norm": float(norm),
            "train/lr": self.optimizer.last_lr,
            "train/num_targets": targets,
            "training/global_step": step,
            "training/epoch": epoch,
            "timing_s/step": seconds,
            "perf/mfu": self.flops.utilisation(lengths, seconds),
            **performance_metrics(
                sum(lengths), seconds, self.session.world_size, self.session.device
            ),
        }

    @torch.no_grad()
    def _loss_of(self, data: SFTDataset) -> float:
        """Mean of -log p over every target of `data`."""
        size, total = self.config.data.train_batch_size, 0.0
        with self.session.phase("testing"):
            self.model.eval()
            for start in range(0, len(data), size):
                loss = torch.zeros((), device=self.session.device)
                for batch, counted in self._micro_batches(data[start : start + size]):
                    loss += self._sum_of_losses(batch) * counted
                total += self._sum_over_ranks(loss)
        return total / sum(sample.num_targets for sample in data)

    def _micro_batches(self, samples: Sequence[SFTSample]) -> Iterator[tuple[PackedBatch, bool]]:
        """This rank's share of `samples`, packed; and whether it counts, see `MicroBatch`."""
        data, replicas = self.config.data, self.config.data_parallel_size
        lengths, most = [len(s.ids) for s in samples], data.max_token_len_per_gpu * self.shared
        if data.micro_batch_size_per_gpu is not None:
            lengths, most = [1] * len(samples), data.micro_batch_size_per_gpu
        split = split_micro_batches(lengths, replicas, most)
        for micro in split[self.session.rank // self.shared]:
            chosen = [samples[i] for i in micro.indices]
            packed = pack_targets(
                [s.ids for s in chosen],
                [s.is_target for s in chosen],
                self.session.device,
                self.group,
            )
            yield packed, micro.counted

    def _sum_of_losses(self, batch: PackedBatch) -> Tensor:
        return -packed_log_probs(self.model, batch)[0].sum()

    def _sum_over_ranks(self, value: Tensor) -> float:
        dist.all_reduce(value)
        return float(value) / self.shared  # ranks that share a micro-batch each hold all its loss

    def _save(self, step: int, score: float | None) -> None:
        whole = self.config.trainer.save_hf_model
        with self.session.phase("save_checkpoint"):
            self.checkpoints.save(
                step, score, lambda f: save_description(self.model, self.tokenizer, f, whole)
            )


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


class _Report:
    """Console, metric files and summary of one run; only rank 0 writes."""

    def __init__(self, config: SFTConfig, session: Session, steps: int, first_step: int) -> None:
        self._config, self._session, self._steps = config, session, steps
        self._dir, self._last = Path(config.trainer.default_local_dir), dict[str, float]()
        if not session.is_main:
            return
        self._dir.mkdir(parents=True, exist_ok=True)
        (self._dir / "config.yaml").write_text(config_to_yaml(config))
        self._console = Console()
        self._logger = MetricsLogger(
            self._dir,
            config.trainer.logger,
            total_steps=steps,
            console=self._console,
            first_step=first_step,
            project=config.trainer.project_name,
            experiment=config.trainer.experiment_name,
            config=asdict(config),
        )
        self._progress = Progress(steps - first_step, console=self._console)

    def __enter__(self) -> _Report:
        if self._session.is_main:
            self._progress.__enter__()
            self._session.on_phase = lambda phase: self._progress.enter(phase, self._session.step)
        return self

    def __exit__(self, *error: Any) -> None:
        if self._session.is_main:
            self._progress.__exit__(*error)
            self._logger.close()

    def say(self, what: Table | str) -> None:
        if self._session.is_main:
            self._console.print(what, soft_wrap=True)

    def log(self, step: int, metrics: dict[str, float]) -> None:
        self._last |= metrics
        if self._session.is_main:
            self._logger.log(step, metrics)
            if step:
                self._progress.finish_step(int(metrics["perf/total_num_tokens"]))

    def finish(self, seconds: float) -> None:
        if not self._session.is_main:
            return
        names = ("train/loss", "val/loss", "perf/throughput", "perf/mfu")
        summary = {"seconds": seconds, "steps": self._steps, "seed": self._config.seed}
        summary |= {name: self._last[name] for name in names if name in self._last}
        write_summary(self._dir / "summary.json", summary)
        self.say(f"{self._steps} steps; see {self._dir}/{{summary.json,final,metrics.jsonl}}")
