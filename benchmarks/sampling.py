"""Sampling of one token per row of logits, with its log-prob.

`vllm` is what vLLM's sampler does on this device with the same parameters and processed log-probs:
temperature, min-p, top-k, top-p, log-softmax and the draw. The limit is one read of the logits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks._bench import OURS, Bench
from hybridengine.engine.vllm.environment import vllm_available
from hybridengine.kernels import sample_tokens

VOCABS = (49_152, 151_936)
ROWS = (1, 32, 128)
PARAMETERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "top-k": {"top_k": 50},
    "top-p": {"top_p": 0.95},
    "top-k top-p": {"top_k": 20, "top_p": 0.8},
    "min-p": {"min_p": 0.05},
}


def run(bench: Bench) -> None:
    for vocab in (500,) if bench.quick else VOCABS:
        for rows in (2,) if bench.quick else ROWS:
            logits = zipf_logits(rows, vocab, bench.device)
            for name, parameters in PARAMETERS.items():
                compare(bench, name, logits, {"temperature": 0.8, **parameters})


def zipf_logits(rows: int, vocab: int, device: torch.device) -> Tensor:
    """Return logits of probabilities rank^-1.2 in random order.

    At temperature 0.8, top-p 0.95 keeps some 200 entries and top-p 0.8 some 15, as the kept sets of
    a language model do (docs/algorithms.md).
    """
    ranks = torch.rand(rows, vocab, device=device).argsort(1) + 1
    return -1.2 * ranks.log()


def compare(bench: Bench, name: str, logits: Tensor, parameters: dict[str, Any]) -> None:
    rows, vocab = logits.shape
    seeds = torch.arange(rows, device=logits.device)
    positions = torch.zeros_like(seeds)
    implementations: dict[str, Callable[[], object]] = {
        OURS: lambda: sample_tokens(logits, seeds, positions, **parameters),
        "torch sort": lambda: torch_sampler(logits, **parameters),
    }
    if vllm_available():
        implementations["vllm"] = vllm_sampler(logits, **parameters)
    bench.compare(
        "sample_tokens",
        "forward",
        f"{name} {rows}x{vocab}",
        logits.dtype,
        implementations,
        bytes_moved=logits.nbytes,
        peak="read",
    )


def torch_sampler(
    logits: Tensor, temperature: float, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Sample as a plain PyTorch expression does."""
    z = logits / temperature
    if min_p:
        probabilities = z.softmax(-1)
        least = min_p * probabilities.amax(-1, keepdim=True)
        z = z.masked_fill(probabilities < least, -torch.inf)
    if top_k:
        z = z.masked_fill(z < z.topk(top_k).values[:, -1:], -torch.inf)
    if top_p < 1.0:
        ordered, ids = z.sort(descending=True)
        probabilities = ordered.softmax(-1)
        removed = probabilities.cumsum(-1) - probabilities >= top_p
        z = z.masked_fill(removed.scatter(1, ids, removed), -torch.inf)
    log_probs = z.log_softmax(-1)
    tokens = log_probs.exp().multinomial(1)
    return tokens, log_probs.gather(1, tokens)


def vllm_sampler(
    logits: Tensor, temperature: float, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> Callable[[], object]:
    """Return a call of vLLM's first model runner's sampler, with a seed for every row."""
    from vllm.v1.sample.logits_processor import LogitsProcessors
    from vllm.v1.sample.logits_processor.builtin import MinPLogitsProcessor
    from vllm.v1.sample.sampler import Sampler

    rows = logits.shape[0]
    per_row = torch.ones(rows, device=logits.device)
    processors = LogitsProcessors()
    if min_p:
        processor = MinPLogitsProcessor.__new__(MinPLogitsProcessor)
        processor.min_p_count, processor.min_p = rows, (per_row * min_p).unsqueeze(1)
        processors = LogitsProcessors([processor])
    sampler = Sampler("processed_logprobs")
    metadata = sampling_metadata(
        per_row * temperature,
        top_p=per_row * top_p if top_p < 1.0 else None,
        top_k=(per_row * top_k).int() if top_k else None,
        logitsprocs=processors,
    )

    def call() -> object:
        if metadata.top_k is not None:
            metadata.top_k.fill_(top_k)  # vLLM's top-k counts it down in place
        return sampler(logits.clone(), metadata)  # it writes to the logits

    return call


def sampling_metadata(temperature: Tensor, **options: Any) -> Any:
    """Return vLLM's `SamplingMetadata` of requests [rows], each with a seed of its own.

    options: fields that differ from those of requests without penalties, top-k and top-p.
    """
    from vllm.v1.sample.logits_processor import LogitsProcessors
    from vllm.v1.sample.metadata import SamplingMetadata

    device, is_greedy = temperature.device, (temperature == 0).tolist()
    random = [row for row, greedy in enumerate(is_greedy) if not greedy]
    empty = torch.empty(0, device=device)
    given: dict[str, Any] = {
        "temperature": temperature,
        "all_greedy": not random,
        "all_random": not any(is_greedy),
        "top_p": None,
        "top_k": None,
        "generators": {row: torch.Generator(device).manual_seed(row) for row in random},
        "max_num_logprobs": 0,
        "no_penalties": True,
        "prompt_token_ids": None,
        "frequency_penalties": empty,
        "presence_penalties": empty,
        "repetition_penalties": empty,
        "output_token_ids": [[] for _ in is_greedy],
        "allowed_token_ids_mask": None,
        "bad_words_token_ids": {},
        "logitsprocs": LogitsProcessors(),
    }
    return SamplingMetadata(**(given | options))
