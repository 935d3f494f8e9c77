"""The ranks of `hybridengine tune`. `python -m hybridengine.lab.tune.run KIND CONFIG` is one.

They build what a run builds: model, optimizer, engine and weight sync. Steps of full length then
find the largest micro-batch that fits, further syncs the fastest buckets; the cache that an engine
needs is computed from its own blocks. Nothing is trained, and nothing is written.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console

from hybridengine.lab.tune.jobs import (
    PeakMemory,
    Probe,
    RLJob,
    SFTJob,
    best_limit,
    probe_limits,
    smallest_fast,
)
from hybridengine.model import on_device
from hybridengine.run.config import ConfigError, JobConfig, RLConfig, SFTConfig
from hybridengine.run.launch import temporary_folder
from hybridengine.run.rank import run_rank
from hybridengine.run.session import Session
from hybridengine.train.build import build_resharder
from hybridengine.train.start import config_of_rank, launch, silence_libraries

_BUCKETS_MIB = (16, 64, 256, 1024)
_SYNCS = 3  # of a bucket size, the fastest counts
_GPU_SHARE = 0.95  # of a GPU for the engine and what the trainer keeps beside it
_MIB, _GIB = 2.0**20, 2.0**30


def launch_tuning(config: JobConfig) -> int:
    """Probe the sizes of a job on this machine, print the overrides, and return the exit code.

    Raises:
        ConfigError: for a job whose ranks have different roles or are on several machines, and
            for one whose micro-batches are counted in conversations.
    """
    if config.trainer.nnodes > 1:
        raise ConfigError(
            f"trainer.nnodes is {config.trainer.nnodes}, but the probes run on one machine; set "
            "trainer.nnodes=1, with the batch divided likewise"
        )
    if isinstance(config, RLConfig) and (config.overlaps or config.num_critic_ranks):
        raise ConfigError(
            "the probes run where every rank trains and generates; set trainer.mode=sync, "
            "rollout.servers=[] and critic.n_gpus_per_node=0"
        )
    if isinstance(config, SFTConfig) and config.data.micro_batch_size_per_gpu is not None:
        raise ConfigError(
            f"data.micro_batch_size_per_gpu is {config.data.micro_batch_size_per_gpu}; remove it: "
            "the probes search data.max_token_len_per_gpu"
        )
    job: Any = config
    with temporary_folder() as folder:
        trainer: Any = replace(config.trainer, default_local_dir=str(folder))
        if isinstance(config, RLConfig):
            trainer = replace(trainer, rollout_freq=-1)
        return launch(replace(job, trainer=trainer), __name__)


def _tune(session: Session, config: Any) -> None:
    """Run all probes on one rank and print what they found, on the first one."""
    job: RLJob | SFTJob = (SFTJob if isinstance(config, SFTConfig) else RLJob)(config, session)
    session.on_phase = lambda phase: None  # printed until now
    memory = PeakMemory(session.device, config.trainer.n_gpus_per_node)
    console = Console(width=None if sys.stdout.isatty() else 100, quiet=not session.is_main)
    overrides = dict[str, str]()
    allowed = _least(memory.allowed)
    probes = list[Probe]()
    console.print(f"micro-batches, at most {allowed / _GIB:.2f} GiB on a rank:")
    job.train_on(job.shortest)  # allocates gradients and moments, compiles kernels
    for probe in probe_limits(
        job.shortest, job.longest, allowed, lambda limit: _step(job, memory, limit)
    ):
        probes.append(probe)
        console.print(
            f"  {job.key}={probe.limit}: {probe.memory / _GIB:.2f} GiB, {probe.rate:,.0f} tokens/s"
        )
    if (best := best_limit(probes, allowed)) is None:
        raise ConfigError(
            f"a micro-batch of the longest sequence, {job.shortest} tokens, takes "
            f"{probes[0].memory / _GIB:.2f} GiB on a rank of {allowed / _GIB:.2f}; use "
            "more ranks, ulysses_sequence_parallel_size, or "
            "model.enable_gradient_checkpointing"
        )
    overrides[job.key] = f"{best.limit}"
    if isinstance(job, RLJob):
        overrides |= _sync_buckets(job, console)
        overrides |= _engine_cache(job, memory, console)
    console.print("what fits best, as overrides:")
    console.print("  " + " ".join(f"{k}={v}" for k, v in overrides.items()), soft_wrap=True)
    job.close()


def _step(job: RLJob | SFTJob, memory: PeakMemory, limit: int) -> Probe:
    """Measure one step in micro-batches of `limit` tokens; every rank returns the same."""
    memory.restart()
    started = time.perf_counter()
    tokens = job.train_on(limit)
    seconds = time.perf_counter() - started
    slowest, peak = _largest(seconds, memory.peak)
    return Probe(limit, peak, tokens / slowest)


def _sync_buckets(job: RLJob, console: Console) -> dict[str, str]:
    """Time dense syncs in buckets of several sizes, up to one that holds all that a rank gets."""
    console.print("weight sync:")
    probes = list(_syncs(job))
    for probe in probes:
        console.print(f"  reshard.bucket_mib={probe.limit}: {1e3 / probe.rate:.1f} ms")
    return {"reshard.bucket_mib": f"{smallest_fast(probes).limit}"}


def _syncs(job: RLJob) -> Iterator[Probe]:
    """Yield the rate, syncs per second, of each bucket size."""
    for mib in _BUCKETS_MIB:
        config = job.config
        config = replace(config, reshard=replace(config.reshard, bucket_mib=mib))
        with on_device(job.model):
            job.source.sleep()
            resharder = build_resharder(
                config, job.actor, job.source.engine, "off", job.source.shared.base
            )
            times = list[float]()
            for _ in range(1 + _SYNCS):  # the first one allocates
                job.session.step += 1
                times.append(resharder.sync(job.session.step).milliseconds)
        [slowest] = _largest(min(times[1:]))
        yield Probe(mib, 2 * mib * _MIB, 1e3 / slowest)
        if len(resharder.plan.buckets) == 1:
            return


def _engine_cache(job: RLJob, memory: PeakMemory, console: Console) -> dict[str, str]:
    """Compare the engine's cache with what all sequences that may run at once need."""
    cache = job.source.engine.cache_size()
    if cache is None:
        return {}
    config, rollout = job.config, job.config.rollout
    prompts = -(-config.data.train_batch_size // job.source.engine.replicas)
    sequences = min(rollout.max_num_seqs, prompts * rollout.n)
    needed = sequences * -(-config.max_model_len // cache.block_size) * cache.block_size
    console.print(
        f"cache: {cache.num_tokens:,} tokens, {cache.num_bytes / _GIB:.2f} GiB; {sequences} "
        f"sequences of {config.max_model_len} tokens need {needed:,}"
    )
    wanted = needed * cache.num_bytes / cache.num_tokens
    if torch.cuda.is_available():
        total = torch.cuda.mem_get_info()[1]
        share = rollout.gpu_memory_utilization + (wanted - cache.num_bytes) / total
        [trainer_share] = _largest(torch.cuda.memory_reserved() / total)
        return {"rollout.gpu_memory_utilization": f"{min(share, _GPU_SHARE - trainer_share):.2f}"}
    most = _least(memory.allowed - memory.peak) + cache.num_bytes
    return {"rollout.kv_cache_gib": f"{math.ceil(min(wanted, most) / _GIB * 100) / 100:g}"}


def _largest(*numbers: float) -> list[float]:
    """Return the maxima over all ranks. Collective."""
    values = torch.tensor(numbers, dtype=torch.float64)
    dist.all_reduce(values, dist.ReduceOp.MAX)
    return values.tolist()


def _least(number: float) -> float:
    """Return the minimum over all ranks. Collective."""
    return -_largest(-number)[0]


if __name__ == "__main__":
    silence_libraries()
    config = config_of_rank()
    sys.exit(
        run_rank(
            lambda session: _tune(session, config),
            config.trainer.default_local_dir,
            config.trainer.timeout_s,
        )
    )
