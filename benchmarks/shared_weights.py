"""An update that computes with the engine's weights, and one that gathers them from shards.

Two and four gloo ranks (on a GPU machine: as many GPUs), each with a vLLM engine (TP 1) or with
half of one (TP 2, in `update`, where the heads divide), at the shapes of SmolLM2-135M and of a
model of 0.5B parameters:
  hybridengine    with the engine's weights (`model.share_engine_weights`)
  shards          ours with FSDP2 shards
  trl_peft        TRL's way without its trainer: the whole base and PEFT's adapters under DDP, and
                  its log-probs from logits
Pass `update`: LoRA of rank 16 on all linear layers, one micro-batch. Pass `update_all`: all
parameters with float32 masters, two micro-batches, and the weight sync, without trl_peft.

Each row in new processes, the most of the ranks. The memory of weights (`weights_mib`) is that of
the tensors of engine and trainer, adapters among them, counted once where they share it.
`gathered_mib`: what all-gathers receive on a rank for one micro-batch; of `hybridengine` these are
adapters alone, or nothing, and at TP 2 also what the other rank has of the base. `peak_mib`: of the
process during updates, over its memory before engine and trainer. `ms_p50`: forward, backward,
AdamW, and in `update_all` the sync. In bfloat16, and in float32 where a CPU multiplies bfloat16
slowly. Small rows come first. A row that does not fit the available memory is left out, with the
reason.
"""

from __future__ import annotations

import ctypes
import importlib.util
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from benchmarks._bench import OURS, Bench, short, status_kib
from benchmarks._models import smollm2_135m
from hybridengine.kernels import has_fast_products
from hybridengine.model.fsdp import DirectAllGather
from hybridengine.model.shared_weights import SlicedWeights
from tests.loading import load_sharded
from tests.ranks import run_ranks
from tests.sync.vllm_engines import build_engine

RANKS, RANK_OF_LORA = (2, 4), 16
UPDATES = 3
MARGIN = 1.2  # of the estimate of memory: a row that needs more than there is is left out
# Sequences and tokens of each in a micro-batch; less where a product takes ten times as long.
TOKENS, TOKENS_IF_SLOW = (4, 64), (1, 16)
# The implementations of each pass, and its micro-batches.
PASSES = {"update": (("trl_peft", "shards", OURS), 1), "update_all": (("shards", OURS), 2)}


def run(bench: Bench) -> None:
    if importlib.util.find_spec("vllm") is None:
        print("# shared_weights: needs vllm", flush=True)
        return
    dtypes = [torch.bfloat16]
    if not has_fast_products(torch.bfloat16, bench.device):
        dtypes.append(torch.float32)
    for config in configs(bench.quick):
        for dtype in dtypes:
            with tempfile.TemporaryDirectory() as folder:
                million = write_model(folder, config, dtype)
                divided = [("update", 2)] if config.num_attention_heads % 2 == 0 else []
                rows = [*product(PASSES, [1]), *divided]
                worlds = RANKS[:1] if bench.quick else RANKS
                for num_ranks, (passed, tp_size) in product(worlds, rows):
                    shape = f"{million}M N={num_ranks} tp={tp_size}"
                    needed = num_ranks * _gib_of_rank(million, passed, dtype)
                    if (available := available_gib()) < needed:
                        reason = f"needs about {needed:.0f} GiB, and {available:.0f} are available"
                        missing = dict.fromkeys(PASSES[passed][0], reason)
                        bench.leave_out("shared_weights", passed, shape, dtype, missing)
                        continue
                    _compare(bench, folder, passed, tp_size, num_ranks, shape, dtype)


def _compare(
    bench: Bench,
    folder: str,
    passed: str,
    tp_size: int,
    num_ranks: int,
    shape: str,
    dtype: torch.dtype,
) -> None:
    figures: dict[str, dict[str, float]] = {}
    names, num_micro_batches = PASSES[passed]
    has_trl = "trl_peft" not in names or importlib.util.find_spec("trl")
    missing = {} if has_trl else {"trl_peft": "trl is not installed"}
    bench.leave_out("shared_weights", passed, shape, dtype, missing)
    for name in (name for name in names if name not in missing):
        arguments = (folder, passed, name, num_micro_batches, tp_size, dtype)
        ranks = run_ranks(_rank, num_ranks, *arguments, timeout_s=580, device=bench.device.type)
        figures[name] = own = {key: max(rank[key] for rank in ranks) for key in ranks[0]}
        best = min((f["ms_p50"] for n, f in figures.items() if n != OURS), default=own["ms_p50"])
        bench.add(
            "shared_weights",
            passed,
            name,
            shape,
            dtype=short(dtype),
            isa=None,
            device=f"{num_ranks} ranks, 1 thread each" if bench.gpu is None else bench.device_name,
            ratio_to_best_peer=best / own["ms_p50"] if name == OURS else None,
            note=f"  weights {own['weights_mib']:.1f} MiB, "
            f"gathered {own['gathered_mib']:.2f} MiB per micro-batch",
            **own,
        )
    for name in figures.keys() - {OURS}:
        of_weights = figures[OURS]["weights_mib"] / figures[name]["weights_mib"]
        print(f"# memory of weights {of_weights:.2f} of {name}'s", flush=True)


def configs(quick: bool) -> Iterable[Any]:
    from transformers import LlamaConfig

    if quick:
        sizes: dict[str, Any] = dict(vocab_size=1024, hidden_size=256, intermediate_size=512)
        return [LlamaConfig(**sizes, num_hidden_layers=2, num_attention_heads=8, head_dim=32)]
    sizes = dict(vocab_size=151_936, hidden_size=896, intermediate_size=4864, num_hidden_layers=24)
    heads: dict[str, Any] = dict(
        num_attention_heads=14, num_key_value_heads=2
    )  # the shape of Qwen2.5-0.5B
    return [smollm2_135m(), LlamaConfig(**sizes, **heads, tie_word_embeddings=True)]


def _gib_of_rank(million: int, passed: str, dtype: torch.dtype) -> float:
    """Estimate a rank's memory: 1 GiB of libraries, and what a parameter of the model takes.

    The engine's, gathered and shared weights, and of full parameters the float32 shards, gradients
    and moments of two ranks.
    """
    per_weight = 3 * dtype.itemsize + (10 if passed == "update_all" else 2)
    return MARGIN * (1 + million * 1e6 * per_weight / 2**30)


def available_gib() -> float:
    """Return the memory of this machine that is available, in GiB; on a GPU no limit."""
    if torch.cuda.is_available():
        return float("inf")
    lines = Path("/proc/meminfo").read_text().splitlines()
    (kib,) = (line.split()[1] for line in lines if line.startswith("MemAvailable"))
    return int(kib) / 2**20


def write_model(folder: str, config: Any, dtype: torch.dtype) -> int:
    """Write random weights; return the millions of them."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.save_pretrained(folder)
    return round(sum(p.numel() for p in model.parameters()) / 1e6)


def _rank(
    rank: int,
    world_size: int,
    path: str,
    passed: str,
    name: str,
    num_micro_batches: int,
    tp_size: int,
    dtype: torch.dtype,
) -> dict[str, float]:
    before = _memory_kib("VmRSS")
    trains_all = passed == "update_all"
    engine, _ = build_engine(path, tp_size, dtype, 0 if trains_all else RANK_OF_LORA)
    engine_tensors = [*engine.target.weights().values()]
    engine.sleep()
    draw = torch.Generator().manual_seed(rank)
    tokens = TOKENS if has_fast_products(dtype, _device()) else TOKENS_IF_SLOW
    ids = torch.randint(1000, tokens, generator=draw).to(_device())
    if trains_all:
        model, micro_batch, finish = _with_all(engine, name == OURS, path, ids, dtype)
    else:
        build = _with_peft if name == "trl_peft" else _with_adapters
        model, micro_batch, finish = build(engine if name == OURS else None, path, ids, dtype)
    if _device().type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    else:
        ctypes.CDLL(None).malloc_trim(0)  # what reading the checkpoint has left
        Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
    with _gathers() as received:
        micro_batch()
    finish()
    times = []
    for _ in range(UPDATES):
        dist.barrier()
        start = time.perf_counter()
        for _ in range(num_micro_batches):
            micro_batch()
        finish()
        if _device().type == "cuda":
            torch.cuda.synchronize()
        times.append((time.perf_counter() - start) * 1e3)
    peak = (_memory_kib("VmHWM") - before) / 2**10
    return {
        "ms_p50": median(times),
        "weights_mib": _bytes_of([*engine_tensors, *model.parameters()]) / 2**20,
        "gathered_mib": sum(received) / 2**20,
        "peak_mib": peak,
    }


Parts = tuple[Any, Callable[[], None], Callable[[], object]]
"""A model, what runs forward and backward of a micro-batch, and what ends the update."""


def _with_all(engine: Any, shares: bool, path: str, ids: torch.Tensor, dtype: torch.dtype) -> Parts:
    """Return our model, all of whose parameters are trained. shares: with `engine`'s weights."""
    from hybridengine.model import SharedParameters, parameter_shards, sharding_mesh
    from hybridengine.reshard import Resharder

    model = load_sharded(
        path,
        mesh=sharding_mesh(_device().type, dist.get_world_size()),
        param_dtype=dtype,
    )
    if shares:
        SharedParameters(model, engine.share_weights(dtype, frozen=False), engine.target)
    resharder = Resharder(lambda: parameter_shards(model), engine, delta="off")
    resharder.sync()
    micro_batch, step = _training(model, ids)

    def finish() -> None:
        step()
        engine.sleep()
        resharder.sync()

    return model, micro_batch, finish


def _training(model: Any, ids: torch.Tensor) -> tuple[Callable[[], None], Callable[[], object]]:
    """Return what runs our forward and backward, and what steps."""
    from hybridengine.model import Optimizer, pack_rollouts, packed_log_probs

    optimizer = Optimizer(model, lr=1e-5, total_steps=UPDATES + 1)
    half = ids.shape[1] // 2
    batch = pack_rollouts([(row[:half], row[half:]) for row in ids.tolist()], _device())

    def micro_batch() -> None:
        packed_log_probs(model, batch)[0].mean().backward()

    return micro_batch, lambda: optimizer.step(1.0)


def _with_adapters(engine: Any, path: str, ids: torch.Tensor, dtype: torch.dtype) -> Parts:
    """Return our model with adapters. engine: whose weights are the base."""
    from hybridengine.model import apply_lora, sharding_mesh

    model = load_sharded(
        path,
        mesh=sharding_mesh(_device().type, dist.get_world_size()),
        param_dtype=dtype,
        adapt=lambda plain: apply_lora(plain, RANK_OF_LORA, RANK_OF_LORA),
        base_memory=engine.share_weights(dtype) if engine is not None else {},
    )
    return model, *_training(model, ids)


def _with_peft(engine: None, path: str, ids: torch.Tensor, dtype: torch.dtype) -> Parts:
    """Return PEFT's model under DDP, trained by TRL's log-probs."""
    from peft import LoraConfig, get_peft_model
    from torch.nn.parallel import DistributedDataParallel
    from transformers import AutoModelForCausalLM
    from trl.trainer.utils import selective_log_softmax

    plain: Any = AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
    plain = plain.to(_device())
    adapters = LoraConfig(r=RANK_OF_LORA, lora_alpha=RANK_OF_LORA, target_modules="all-linear")
    model = DistributedDataParallel(get_peft_model(plain, adapters))
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-5)
    half = ids.shape[1] // 2

    def micro_batch() -> None:
        logits = model(input_ids=ids, logits_to_keep=half + 1).logits[:, :-1]
        selective_log_softmax(logits, ids[:, half:]).mean().backward()

    def finish() -> None:
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return model, micro_batch, finish


@contextmanager
def _gathers() -> Iterator[list[int]]:
    """Yield the bytes that each all-gather of FSDP2, or of a sliced base, receives while open."""
    received: list[int] = []

    def counting(gather: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor)]
            sizes = sorted(tensor.nbytes for tensor in tensors)  # input and output
            received.append(sizes[1] - sizes[0])
            return gather(*args, **kwargs)

        return call

    def counting_chunks(exchange: Callable[..., Any]) -> Callable[..., Any]:
        def call(weights: SlicedWeights, chunks: list[torch.Tensor]) -> Any:
            own = dist.get_group_rank(weights.group, dist.get_rank())
            received.append(sum(x.nbytes for rank, x in enumerate(chunks) if rank != own))
            return exchange(weights, chunks)

        return call

    own, torchs = DirectAllGather.__call__, dist.all_gather_into_tensor
    with (
        patch.object(SlicedWeights, "exchange", counting_chunks(SlicedWeights.exchange)),
        patch.object(DirectAllGather, "__call__", counting(own)),
        patch.object(dist, "all_gather_into_tensor", counting(torchs)),
    ):
        yield received


def _bytes_of(tensors: Iterable[torch.Tensor]) -> int:
    """Return the bytes of the tensors' storages on this rank, each counted once."""
    from hybridengine.sync.shards import local_shard

    storages = (local_shard(tensor).untyped_storage() for tensor in tensors)
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def _device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _memory_kib(field: str) -> int:
    """Return a field of the process's status; on a GPU what its allocator has."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() >> 10
    return status_kib(field)
