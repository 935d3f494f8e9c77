"""Time of generation: prefill and decode of one engine with continuous batching.

An engine step reads the weights once for all sequences, and every sequence's keys and values:
its products take the longer of reading weights and computing, its attention the longer of reading
the cache and computing (the roofline of Pope et al. 2022, arXiv 2211.05102). The scheduler is
vLLM's: sequences are admitted while the cache has room for their prompt; when it is full, the last
admitted is preempted and computed again later. Prompts are computed before decoding goes on.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from hybridengine.lab.simulate.cluster import Cluster
from hybridengine.lab.simulate.model import ModelShape, Workload


@dataclass(frozen=True)
class Generation:
    """The generation of a step on the slowest engine, in seconds.

    tail: the part of `decode` with less than a quarter of the slots in use.
    mean_batch: sequences decoded at once, averaged over time.
    preempted: the share of sequences that are computed again.
    """

    prefill: float
    decode: float
    tail: float
    mean_batch: float
    preempted: float

    @property
    def seconds(self) -> float:
        return self.prefill + self.decode


class EngineModel:
    """Times of an engine of `tp_size` ranks."""

    def __init__(self, model: ModelShape, work: Workload, cluster: Cluster, tp_size: int) -> None:
        self.model, self.work, self.cluster, self.tp_size = model, work, cluster, tp_size
        self.kv_bytes = model.kv_bytes(tp_size, work.engine_itemsize)

    def prefill(self, tokens: float, pairs: float, batch: int) -> float:
        """Seconds to compute prompts, and the first token of `batch` sequences."""
        model, cluster, tp_size = self.model, self.cluster, self.tp_size
        flops = tokens * model.token_flops + batch * model.head_flops
        products = cluster.products(flops / tp_size)
        attention = cluster.attention(pairs * model.pair_flops / tp_size)
        steps = math.ceil(tokens / 8192)  # vLLM's max_num_batched_tokens: steps of a prefill
        return products + attention + self._reductions(tokens, steps) + steps * self._fixed()

    def decode_step(self, batch: float, cached: float) -> float:
        """Seconds of a step of `batch` sequences with `cached` tokens in all."""
        model, cluster, tp_size = self.model, self.cluster, self.tp_size
        flops = batch * (model.token_flops + model.head_flops) / tp_size
        weights = self.work.engine_itemsize * model.active_parameters(batch) / tp_size
        products = max(cluster.products(flops), cluster.stream(weights))
        attention = max(
            cluster.stream(cached * self.kv_bytes),
            cluster.attention(cached * model.decode_pair_flops / tp_size),
        )
        return products + attention + self._reductions(batch, 1) + self._fixed()

    def _fixed(self) -> float:
        return self.cluster.efficiency.engine_step_ms * 1e-3

    def _reductions(self, tokens: float, steps: int) -> float:
        """Two all-reduces per layer, over the ranks of the engine."""
        if self.tp_size == 1:
            return 0.0
        num_bytes = self.work.engine_itemsize * tokens / steps * self.model.hidden_size
        once = self.cluster.all_reduce(num_bytes, self.tp_size)
        return 2 * self.model.num_layers * steps * once


class _Schedule:
    """Sequences of one engine, in numbers of tokens; see the module.

    done, remaining: generated and to come, of the sequences in decoding.
    waiting: the same pairs for the sequences that wait.
    own_prompt: cached tokens of a prompt per response, see `prompt_per_response`.
    """

    def __init__(self, lengths: np.ndarray, own_prompt: float, slots: int, capacity: int) -> None:
        self.waiting = deque((0, int(length)) for length in lengths)
        self.done, self.remaining = np.zeros((2, 0), np.int64)
        self.own_prompt, self.slots, self.capacity = own_prompt, slots, capacity
        self.preempted = 0

    def admit(self) -> np.ndarray:
        """Move sequences that fit from waiting to decoding; return their generated tokens.

        The prefill computes these again, and generates one token more.
        """
        admitted = list[tuple[int, int]]()
        cached = self.cached
        while self.waiting and len(self.done) + len(admitted) < self.slots:
            needed = self.own_prompt + self.waiting[0][0] + 1
            if cached + needed > self.capacity and (admitted or len(self.done)):
                break
            cached += needed
            admitted.append(self.waiting.popleft())
        new = np.array(admitted, np.int64).reshape(-1, 2)
        going_on = new[new[:, 1] > 1]
        self.done = np.concatenate([self.done, going_on[:, 0] + 1])
        self.remaining = np.concatenate([self.remaining, going_on[:, 1] - 1])
        return new[:, 0]

    def decode(self) -> int:
        """Decode until a sequence ends or the cache is full; return the steps."""
        batch = len(self.done)
        steps = int(min(self.remaining.min(), max(1, (self.capacity - self.cached) // batch)))
        self.done, self.remaining = self.done + steps, self.remaining - steps
        going_on = self.remaining > 0
        self.done, self.remaining = self.done[going_on], self.remaining[going_on]
        while len(self.done) > 1 and self.cached + len(self.done) > self.capacity:
            self.waiting.appendleft((int(self.done[-1]), int(self.remaining[-1])))
            self.done, self.remaining = self.done[:-1], self.remaining[:-1]
            self.preempted += 1
        return steps

    @property
    def cached(self) -> float:
        return float(self.done.sum()) + self.own_prompt * len(self.done)


def prompt_per_response(prompt: float, n: int, block: int) -> float:
    """Return the tokens of a prompt that are computed and stored per response.

    Prefix caching shares full blocks of the KV cache; the last token is always computed.
    """
    shared = max(0.0, prompt - 1) // block * block
    return shared / n + (prompt - shared)


@lru_cache(maxsize=1024)
def generate(
    model: ModelShape, work: Workload, cluster: Cluster, tp_size: int, engines: int, capacity: int
) -> Generation:
    """Return the time of the engine with the most tokens.

    capacity: tokens in the KV cache of an engine. Full blocks of a prompt are computed and stored
    once for its responses (prefix caching), and read by each of them.
    """
    engine, prompt = EngineModel(model, work, cluster, tp_size), work.config.prompt_length
    own_prompt = prompt_per_response(prompt, work.config.n, cluster.device.kv_block)
    lengths = max(np.array_split(work.lengths, engines), key=lambda part: int(part.sum()))
    slots = work.config.max_num_seqs
    schedule = _Schedule(lengths, own_prompt, slots, capacity)
    prefill = decode = tail = batch_seconds = 0.0
    while schedule.waiting or len(schedule.done):
        again = schedule.admit()
        if len(again):
            tokens = own_prompt * len(again) + again.sum()
            pairs = own_prompt * len(again) * prompt / 2
            pairs += (again * (prompt + again / 2)).sum()
            prefill += engine.prefill(float(tokens), float(pairs), len(again))
        if not len(schedule.done):  # one token was all
            continue
        batch, before = len(schedule.done), schedule.done.sum()
        steps = schedule.decode()
        read = before + (prompt + steps / 2) * batch
        seconds = steps * engine.decode_step(batch, float(read))
        decode += seconds
        batch_seconds += seconds * batch
        tail += seconds if batch < min(slots, len(lengths)) / 4 else 0.0
    return Generation(
        prefill, decode, tail, batch_seconds / max(decode, 1e-9), schedule.preempted / len(lengths)
    )
