"""What is probed: trainers as those of a run, their peak memory, and the search of settings.

Data of full length takes the place of the real one.
"""

from __future__ import annotations

import math
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil
import torch

from hybridengine.agents.trajectories import with_turns
from hybridengine.engine.interface import SamplingSpec
from hybridengine.engine.response import Response
from hybridengine.run.config import RLConfig, SFTConfig
from hybridengine.run.session import Session
from hybridengine.train.batch import RolloutBatch
from hybridengine.train.data import PromptSample, Subset
from hybridengine.train.models import Actor
from hybridengine.train.modes import Mode
from hybridengine.train.rewards.manager import ResponseTokens, Reward, score_checked
from hybridengine.train.rl import RLTrainer
from hybridengine.train.rollout_source import ColocatedRollouts, Scorer, gather_rollouts
from hybridengine.train.rollouts import Rollouts, ScoredResponse
from hybridengine.train.sft import SFTTrainer

_PASSES = 2  # micro-batches of a rank and optimizer step: the second one finds gradients in memory


class _FullLength(ColocatedRollouts):
    """Rollouts of as many prompts as `num_prompts` says, whose responses have the full length.

    The engine generates nothing. The reward is called once, for the names of its results; a reward
    model is called for every response.
    """

    num_prompts = 0
    _results: Reward | None = None

    def connect(self, actor: Actor, reward_model: Scorer | None) -> None:
        super().connect(actor, reward_model)
        self._reward_model = reward_model

    def next_batch(self, step: int, number: int) -> Rollouts:
        prompts = self._data.loader.next_batch()[: self.num_prompts]
        return self.generate(prompts, self._sampling, seed=step)

    def generate(self, prompts: Subset[PromptSample], spec: SamplingSpec, seed: int) -> Rollouts:
        session = self._session
        if self._results is None:
            turns = self._config.rollout.multi_turn.enable
            sample = with_turns(prompts[0]) if turns else prompts[0]
            scores = score_checked(self._data.reward, [sample], [""], [ResponseTokens([])])
            self._results = scores.of(0)
        mine = range(session.rank, len(prompts), session.world_size)
        own = [self._response(group, k, spec) for group in mine for k in range(spec.n)]
        return gather_rollouts(prompts, own, session, self._reward_model)

    def _response(self, group: int, number: int, spec: SamplingSpec) -> ScoredResponse:
        """Return a response whose score differs from that of the next one: it has a gradient.

        `RLJob` replaces its log-probs.
        """
        size, score = spec.max_tokens, float(number % 2)
        assert self._results is not None
        response = Response(
            array("i", [number % 2]) * size,
            array("f", [0.0]) * size,
            "stop",  # none is masked as truncated
            versions=[(0, size)],
        )
        reward = Reward(
            score,
            extras=dict.fromkeys(self._results.extras, score),
            parts={name: (weight, score) for name, (weight, _) in self._results.parts.items()},
        )
        return ScoredResponse(response, group, reward=reward)


class _FullLengthMode(Mode):
    def rollouts(self, *arguments: Any) -> _FullLength:
        return _FullLength(*arguments)


class RLJob(RLTrainer):
    """One rank whose steps train on responses of full length."""

    key = "actor.ppo_max_token_len_per_gpu"
    source: Any

    def __init__(self, config: RLConfig, session: Session) -> None:
        super().__init__(config, session, _FullLengthMode(config))
        self.printed_samples = True  # these are not worth printing
        self.sync(0)

    def _build_batch(self, rollouts: Rollouts) -> RolloutBatch:
        """Give made-up tokens the trainer's log-probs, so that real checks and corrections hold."""
        batch = super()._build_batch(rollouts)
        return replace(batch, rollout_log_probs=self.actor.old_log_probs(batch))

    @property
    def shortest(self) -> int:
        """The least tokens of a micro-batch on a rank: those of the longest sequence."""
        return -(-self.config.max_sequence_length // self.dp.sp_size)

    @property
    def longest(self) -> int:
        """Tokens of a rank in an optimizer step: more in one micro-batch change nothing."""
        config, ranks = self.config, self.dp.dp_size * self.dp.sp_size
        responses = config.ppo_mini_batch_size * config.rollout.n
        return max(self.shortest, -(-responses * config.max_sequence_length // ranks))

    def train_on(self, limit: int) -> int:
        """Run a step in micro-batches of up to `limit` tokens a rank; return its tokens."""
        config = self.config
        self.config = replace(config, actor=replace(config.actor, ppo_max_token_len_per_gpu=limit))
        ranks = self.dp.dp_size * self.dp.sp_size
        of_group = config.rollout.n * config.data.max_response_length
        wanted = math.ceil(_PASSES * limit * ranks / of_group)  # of an optimizer step
        self.source.num_prompts = self.num_mini_batches * min(wanted, config.ppo_mini_batch_size)
        self.session.step += 1
        self._step_started = time.perf_counter()
        _, lengths = self.step(self.session.step)
        return sum(lengths)


class SFTJob(SFTTrainer):
    """One rank whose steps train on the longest conversations."""

    key = "data.max_token_len_per_gpu"

    def __init__(self, config: SFTConfig, session: Session) -> None:
        super().__init__(config, session)
        rows = sorted(range(len(self.data)), key=lambda i: -len(self.data[i].ids))
        self._longest = Subset(self.data, rows[: config.data.train_batch_size])

    @property
    def shortest(self) -> int:
        return -(-len(self._longest[0].ids) // self.dp.sp_size)

    @property
    def longest(self) -> int:
        ranks = self.dp.dp_size * self.dp.sp_size
        return max(self.shortest, -(-sum(len(s.ids) for s in self._longest) // ranks))

    def train_on(self, limit: int) -> int:
        config = self.config
        self.config = replace(config, data=replace(config.data, max_token_len_per_gpu=limit))
        self.session.step += 1
        _, lengths = self.update(self.session.step, list(self._longest))
        return sum(lengths)


_STEP = 256  # limits between two doublings are multiples of this
_WORTH = 1.25  # a limit is tried if it is larger than the last one by this factor
_SAME_SPEED = 0.97  # of the fastest rate: measurements differ by that much


@dataclass(frozen=True)
class Probe:
    """One measured size.

    limit: the size, in tokens of a micro-batch or MiB of a bucket.
    memory: bytes of the fullest rank at its peak.
    rate: of work, larger is better: tokens per second, or bytes per second.
    """

    limit: int
    memory: float
    rate: float


def probe_limits(
    shortest: int, longest: int, allowed: float, measure: Callable[[int], Probe]
) -> Iterator[Probe]:
    """Yield probes of growing limits, from `shortest` to `longest`, as far as they fit.

    The limit doubles. Where the memory of the next one, extrapolated from the last two, is above
    `allowed` bytes, the largest limit that is predicted to fit is the last one.
    """
    probes, limit = list[Probe](), shortest
    while True:
        probes.append(measure(limit))
        yield probes[-1]
        if limit >= longest or probes[-1].memory > allowed:
            return
        doubled = min(2 * limit, longest)
        fitting = _largest_fitting(probes, allowed)
        following = doubled if doubled <= fitting else int(fitting) // _STEP * _STEP
        if following < doubled and following < _WORTH * limit:
            return
        limit = following


def _largest_fitting(probes: Sequence[Probe], allowed: float) -> float:
    """Extrapolate the limit whose memory is `allowed`; from one probe as if all of it grew."""
    last = probes[-1]
    slope = last.memory / last.limit
    if len(probes) > 1:
        before = probes[-2]
        slope = (last.memory - before.memory) / (last.limit - before.limit)
    return last.limit + (allowed - last.memory) / slope if slope > 0 else float("inf")


def best_limit(probes: Sequence[Probe], allowed: float) -> Probe | None:
    """Return the smallest of the fastest probes that fit in `allowed` bytes; None if none fits."""
    fitting = [probe for probe in probes if probe.memory <= allowed]
    return smallest_fast(fitting) if fitting else None


def smallest_fast(probes: Sequence[Probe]) -> Probe:
    """Return the smallest limit whose rate is within 3% of the best."""
    enough = _SAME_SPEED * max(probe.rate for probe in probes)
    return min((p for p in probes if p.rate >= enough), key=lambda probe: probe.limit)


_SHARE = 0.9  # of the memory: lengths of later steps and fragments need the rest
_OWN = Path("/proc/self")


def _free_memory() -> float:
    """Return the bytes of memory that are free on this machine or in its control group."""
    free = float(psutil.virtual_memory().available)
    with suppress(OSError, ValueError):  # no control group, or "max": without a limit
        limit, used = (
            Path(f"/sys/fs/cgroup/memory.{name}").read_text() for name in ("max", "current")
        )
        free = min(free, float(limit) - float(used))
    return free


class PeakMemory:
    """Peaks of this rank, on its GPU or in its host's memory.

    num_local: ranks that share the host's memory.

    Attributes:
        allowed: bytes that this rank may have at its peak: 0.9 of what it has and what is free,
          without what the engine keeps on the same GPU while it sleeps.
    """

    def __init__(self, device: torch.device, num_local: int) -> None:
        self._cuda = device.type == "cuda"
        if self._cuda:
            free, total = torch.cuda.mem_get_info(device)
            self.allowed = _SHARE * total - (total - free - torch.cuda.memory_reserved(device))
        else:
            self.allowed = psutil.Process().memory_info().rss + _SHARE * _free_memory() / num_local

    def restart(self) -> None:
        """Forget the peaks until now."""
        if self._cuda:
            torch.cuda.reset_peak_memory_stats()
        else:
            (_OWN / "clear_refs").write_text("5")  # proc(5): resets the peak of the resident set

    @property
    def peak(self) -> float:
        """Bytes at the peak since `restart`."""
        if self._cuda:
            return float(torch.cuda.max_memory_reserved())
        lines = (_OWN / "status").read_text().splitlines()
        return 1024.0 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))
