"""Log-probs that a vLLM engine returns against those of the trained model, bit by bit.

Two ranks: FSDP2 over both, an engine of TP 1 on each or of TP 2 over both, weights by the sync. The
engine generates for prompts of 1 to 300 tokens of which many share a prefix, with a cache that is
too small (so that sequences are preempted), prompts in chunks, and hits of the prefix cache. The
model computes the same tokens packed, with shared prefixes once. `exact` is `rollout.exact`; a row
counts the tokens and those whose float32 log-probs differ in any bit. `+LoRA`: with adapters of
rank LORA_RANK on all linear layers, which the sync sends as they are; `+merged`: which it merges.
`top_p`, `top_k`: log-probs over the entries that sampling kept. HYBRIDS have linear attention,
which vLLM computes on a CPU in bfloat16 alone unless it is exact.
"""

from __future__ import annotations

import random
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import partial
from itertools import product
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from benchmarks._bench import OURS, Bench
from tests.engine.exact_types import OTHERS, save_other
from tests.engines import build_engine
from tests.extras.hybrid.hybrid_models import hybrid_config
from tests.extras.moe.exact_mixtures import mixture_config
from tests.loading import load_sharded
from tests.ranks import run_ranks
from tests.tiny_models import VOCAB, save_tiny

KINDS = ("llama", "qwen2", "qwen3", "gemma", "mistral")
HYBRIDS = (("qwen3_5_text", 1), ("qwen3_5_moe_text", 1), ("qwen3_5_moe_text", 2))
TRUNCATIONS: tuple[dict[str, Any], ...] = ({"top_p": 0.8}, {"top_k": 20})
MIXTURES = (
    *("qwen3_moe", "qwen2_moe", "olmoe", "mixtral", "granitemoe", "glm4_moe"),
    *("gpt_oss", "deepseek_v2", "deepseek_v3", "glm4_moe_lite"),
)
TOKENS = {1: 170_000, 2: 30_000}  # of a kind by TP size, a tenth of it for the default
QUICK_TOKENS, FEW_TOKENS, LORA_RANK = 400, 30_000, 8
LENGTH = {"max_position_embeddings": 512}
ROUND_PROMPTS, RESPONSES, MAX_TOKENS = 24, 4, 128


class Case(NamedTuple):
    """A model and how its engine samples.

    save: writes the model into a folder, and returns the folder.
    wanted: tokens to compare, about.
    merges: adapters into the engine's weights.
    sampling: what truncates, of a `SamplingSpec`.
    """

    shape: str
    save: Callable[[str], str]
    wanted: int = FEW_TOKENS
    tp_size: int = 1
    exact: bool = True
    lora_rank: int = 0
    merges: bool = False
    sampling: Mapping[str, Any] = MappingProxyType({})


def cases() -> list[Case]:
    """Return all cases."""

    def tiny(kind: str, text: str = "", **options: Any) -> Case:
        return Case(f"{kind}{text}", partial(save_tiny, kind), **options)

    def mixture(kind: str) -> Callable[[str], str]:
        return lambda folder: save_tiny(mixture_config(kind), folder)

    def other(kind: str) -> Callable[[str], str]:
        return lambda folder: save_other(kind, Path(folder))[1]

    def hybrid(kind: str) -> Callable[[str], str]:
        config = mixture_config(kind) if "moe" in kind else hybrid_config(kind, **LENGTH)
        return partial(save_tiny, config)

    both, sizes = (True, False), (1, 2)
    groups = {
        "dense": [
            tiny(kind, tp_size=tp, exact=exact, wanted=TOKENS[tp] // (1 if exact else 10))
            for kind, tp, exact in product(KINDS, sizes, both)
        ],
        "others": [Case(kind, other(kind)) for kind in OTHERS],
        "mixtures": [
            Case(kind, mixture(kind), tp_size=tp) for kind, tp in product(MIXTURES, sizes)
        ],
        "hybrids": [Case(kind, hybrid(kind), tp_size=tp) for kind, tp in HYBRIDS],
        "adapters": [
            tiny(kind, "+LoRA", tp_size=tp, exact=exact, lora_rank=LORA_RANK)
            for kind, tp, exact in product(KINDS[:2], sizes, both)
        ],
        "merged": [
            tiny("qwen2", "+merged", tp_size=tp, exact=exact, lora_rank=LORA_RANK, merges=True)
            for tp, exact in product(sizes, both)
        ],
        "kept": [
            tiny("qwen2", f" {name}={value}", exact=exact, sampling={name: value})
            for truncation, exact in product(TRUNCATIONS, both)
            for name, value in truncation.items()
        ],
    }
    return [case for group in groups.values() for case in group]


def run(bench: Bench) -> None:
    taken = cases()
    if bench.quick:
        taken = [case._replace(wanted=QUICK_TOKENS) for case in taken if case.tp_size == 2][:2]
    for case in taken:
        with tempfile.TemporaryDirectory() as folder:
            add_row(bench, case, case.save(folder))


def add_row(bench: Bench, case: Case, path: str, vocab: int = VOCAB) -> None:
    """Compare about `case.wanted` tokens of the model at `path`."""
    exact, tp_size = case.exact, case.tp_size
    given = tp_size, exact, case.wanted, case.lora_rank, case.merges, dict(case.sampling)
    results = run_ranks(_rank, 2, path, vocab, *given, timeout_s=1500)
    tokens, differing = (sum(r[i] for r in results) // (tp_size if i < 2 else 1) for i in (0, 1))
    largest, seconds = (max(r[i] for r in results) for i in (2, 3))
    bench.add(
        "parity",
        "exact" if exact else "default",
        OURS,
        f"{case.shape} TP {tp_size} {tokens} tokens",
        f"  {differing} differ, by up to {largest:.1e}",
        dtype="float32",
        ms_p50=seconds * 1e3,
        error_vs_float64=largest,
        tokens=tokens,
        differing=differing,
    )


def _rank(
    rank: int,
    world_size: int,
    path: str,
    vocab: int,
    tp_size: int,
    exact: bool,
    wanted: int,
    lora_rank: int,
    merges: bool,
    sampling: dict[str, Any],
) -> tuple[int, int, float, float]:
    """Return tokens, how many differ, the largest difference, and seconds, of this rank."""

    from hybridengine.engine.interface import SamplingSpec
    from hybridengine.model import (
        KeptIds,
        adapter_shards,
        apply_lora,
        frozen_parameters,
        pack_rollouts,
        packed_log_probs,
        parameter_shards,
        sharding_mesh,
        use_exact_operators,
    )
    from hybridengine.reshard import Resharder

    is_tiny = vocab == VOCAB
    engine = build_engine(
        "vllm",
        path,
        tensor_model_parallel_size=tp_size,
        max_model_len=512,
        stop_token_ids=[vocab - 1],
        adapter_rank=0 if merges else lora_rank,
        kv_cache_gib=(6 if is_tiny else 64) / 1024 / tp_size,
        exact=exact,
        max_num_batched_tokens=96,
        max_num_seqs=64,
    )
    sliced = engine.target.layout.sliced_dims(engine.checkpoint.parameters)
    splits = {name: tp_size for name, dim in sliced.items() if dim == 1}

    def adapt(unsharded: Any) -> None:
        if lora_rank:
            apply_lora(unsharded, lora_rank, 1.5 * lora_rank)
        if exact:
            use_exact_operators(unsharded, splits, torch.float32 if merges else None)

    model = load_sharded(
        path,
        mesh=sharding_mesh("cpu", world_size),
        param_dtype=torch.float32,
        adapt=adapt,
    )
    torch.manual_seed(0)
    with torch.no_grad():
        for adapter in adapter_shards(model).values():
            adapter.left.normal_(std=0.05)  # it is zero at first
    adapters = partial(adapter_shards, model)
    frozen = partial(frozen_parameters, model)
    shards = partial(parameter_shards, model)
    Resharder(shards, engine, adapters=adapters, merge=merges, frozen=frozen).sync(0)
    draw = random.Random(rank // tp_size)
    tokens = lambda n: [draw.randrange(3, vocab) for _ in range(n)]  # noqa: E731
    count = differing = number = 0
    largest, start, done = 0.0, time.perf_counter(), torch.zeros(1)
    shared = tokens(180)
    while not done.item():
        prompts = [
            shared[: draw.randrange(181)] + tokens(draw.randrange(1, 120))
            for _ in range(ROUND_PROMPTS)
        ]
        options = sampling | {"temperature": 0.9, "record_kept": bool(sampling)}
        spec = SamplingSpec(n=RESPONSES, max_tokens=MAX_TOKENS, **options)
        groups = engine.generate(prompts, spec, seed=number)
        pairs: list[tuple[Any, Any]] = [
            (prompt, list(response.token_ids))
            for prompt, group in zip(prompts, groups, strict=True)
            for response in group
        ]
        theirs = torch.tensor([x for group in groups for r in group for x in r.log_probs])
        kept = [r.columns for group in groups for r in group] if sampling else []
        columns = {
            name: torch.tensor([x for r in kept for x in r[name]], dtype=torch.int32)
            for name in ("kept_ids", "num_kept")
        }
        parts = {"kept": KeptIds.from_counts(*columns.values())} if sampling else {}
        batch = pack_rollouts(pairs, shared_prefix=number % 2 == 0, parts=parts)
        with torch.no_grad():
            ours, _ = packed_log_probs(model, batch, spec.temperature)
        count, number = count + len(ours), number + 1
        differing += int((ours.view(torch.int32) != theirs.view(torch.int32)).sum())  # 0.0, -0.0
        largest = max(largest, (ours - theirs).abs().max().item())
        done[0] = count * world_size >= wanted * tp_size
        dist.all_reduce(done, dist.ReduceOp.MIN)  # ranks gather weights together
    seconds = time.perf_counter() - start
    engine.shutdown()
    return count, differing, largest, seconds
