"""`exact_engine` in real vLLM engines: every call has the bits of the trainer's attention."""

from __future__ import annotations

import itertools
import os
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch

from hybridengine.run.errors import UserError
from tests.ranks import run_ranks
from tests.tiny_models import save_tiny

pytest.importorskip("vllm", reason="the rollout engine; `make setup` installs it")

# The second and the third have the first blocks of the first one in common.
SHARED = [3 + 7 * i % 90 for i in range(70)]
PROMPTS = [SHARED, [*SHARED[:64], 5, 6], [*SHARED, *SHARED[:50]], [9, 8, 7], [11] * 33, [4] * 60]
MAX_TOKENS = 40
FEW_BLOCKS = 16  # of 32 tokens: not all requests fit until their end


def build(path: str, dtype: str, tp_size: int, **options: Any) -> Any:
    from hybridengine.engine.vllm.environment import models_inspected_here, unique_shared_memory

    with models_inspected_here(), unique_shared_memory():
        from vllm import LLM

        return LLM(
            path,
            dtype=dtype,
            tensor_parallel_size=tp_size,
            distributed_executor_backend="external_launcher",
            enforce_eager=True,
            skip_tokenizer_init=True,
            max_model_len=256,
            block_size=32,
            kv_cache_memory_bytes=32 << 20,
            **options,
        )


def greedy(llm: Any) -> tuple[list[list[int]], int]:
    """Return the tokens of each prompt, and how many prompt tokens were in the cache."""
    from vllm import SamplingParams

    sampling = SamplingParams(
        temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True, detokenize=False
    )
    requests = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    outputs = llm.generate(requests, sampling, use_tqdm=False)
    return [list(o.outputs[0].token_ids) for o in outputs], sum(
        o.num_cached_tokens for o in outputs
    )


class Checked:
    """Counts the calls of the attention of which every row has the trainer's bits, and others."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()

    def forward(self, forward: Any, impl: Any, layer: Any, *arguments: Any, **named: Any) -> Any:
        from hybridengine.kernels import tree_attention
        from hybridengine.kernels.paged_attention import cache_views, slot_indices

        out = forward(impl, layer, *arguments, **named)
        query, _, _, cache, metadata = arguments[:5]
        if metadata is None:
            return out
        keys, values = cache_views(cache, impl.head_size)
        starts, lengths = metadata.query_start_loc.tolist(), metadata.seq_lens.tolist()
        output = named.get("output", arguments[5] if len(arguments) > 5 else out)
        counts = [end - begin for begin, end in itertools.pairwise(starts)]
        decodes = [count == 1 for count in counts]
        self.calls["mixed"] += any(decodes) and not all(decodes)
        for i, (count, length) in enumerate(zip(counts, lengths, strict=True)):
            rows = slice(starts[i], starts[i + 1])
            positions = torch.arange(length)
            slots = metadata.block_table[i].long()[positions // 32] * 32 + positions % 32
            in_keys, in_values = slot_indices(slots, cache)
            own = query.new_zeros(length, *query.shape[1:])
            own[length - count :] = query[rows]
            expected = tree_attention(
                own,
                keys[in_keys].flatten(2),
                values[in_values],
                torch.full_like(positions, length),
                positions,
                sinks=impl.sinks,
                softmax_scale=impl.scale,
                window_size=impl.sliding_window,
                softcap=impl.logits_soft_cap or None,
            )[length - count :]
            equal = torch.equal(output[rows].view_as(expected), expected)
            self.calls["equal" if equal else "unequal"] += 1
            self.calls["with sinks"] += impl.sinks is not None
            self.calls["windowed"] += impl.sliding_window is not None
            self.calls["continued"] += 1 < count < length
        return out

    def update(self, update: Any, impl: Any, layer: Any, *arguments: Any, **named: Any) -> None:
        from hybridengine.kernels.paged_attention import cache_views, slot_indices

        update(impl, layer, *arguments, **named)
        key, value, cache, slots = arguments
        in_keys, in_values = slot_indices(slots, cache)
        keys, values = cache_views(cache, impl.head_size)
        equal = torch.equal(keys[in_keys].flatten(2), key[: len(slots)])
        equal &= torch.equal(values[in_values], value[: len(slots)])
        self.calls["written" if equal else "miswritten"] += 1


def engine_body(rank: int, world_size: int, path: str, dtype: str) -> dict[str, Any]:
    from hybridengine.engine.vllm.environment import prepare_environment

    prepare_environment()
    from vllm import envs
    from vllm.v1.attention.backends.registry import AttentionBackendEnum
    from vllm.v1.core.sched.scheduler import Scheduler

    from hybridengine.engine.exact.attention_backend import ExactAttention
    from hybridengine.engine.exact.operators import exact_engine

    tokens: dict[str, list[list[int]]] = {}
    own = build(path, dtype, world_size)  # is kept: its end would be that of the process group
    tokens["vllm"], _ = greedy(own)
    checked = Checked()
    forward, update = ExactAttention.forward, ExactAttention.do_kv_cache_update
    preempt = Scheduler._preempt_request

    def count_and_preempt(*arguments: Any, **named: Any) -> Any:
        checked.calls["preempted"] += 1
        return preempt(*arguments, **named)

    with (
        patch.object(ExactAttention, "forward", lambda *a, **k: checked.forward(forward, *a, **k)),
        patch.object(
            ExactAttention, "do_kv_cache_update", lambda *a, **k: checked.update(update, *a, **k)
        ),
        patch.object(Scheduler, "_preempt_request", count_and_preempt),
    ):
        with exact_engine():
            llm = build(path, dtype, world_size, enable_prefix_caching=False)
        tokens["plain"], _ = greedy(llm)
        with exact_engine():
            small = build(
                path,
                dtype,
                world_size,
                max_num_batched_tokens=48,
                max_num_seqs=6,
                num_gpu_blocks_override=FEW_BLOCKS,
                enable_prefix_caching=True,
            )
        tokens["chunked"], _ = greedy(small)
        _, checked.calls["cached"] = greedy(small)
    restored = not AttentionBackendEnum.CPU_ATTN.is_overridden() and not envs.VLLM_MLA_DISABLE
    restored &= "VLLM_MLA_DISABLE" not in os.environ
    return {"tokens": tokens, "calls": dict(checked.calls), "restored": restored}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "dtype", "world_size"),
    [
        pytest.param("qwen3", "float32", 1, marks=pytest.mark.exhaustive),
        ("gemma2", "bfloat16", 1),
        ("qwen3", "float32", 2),
        pytest.param("gpt_oss", "float32", 2, marks=pytest.mark.exhaustive),
    ],
)
def test_an_engine_has_the_bits_of_the_trainer(
    kind: str, dtype: str, world_size: int, tmp_path: Path
) -> None:
    path = save_tiny(kind, tmp_path)
    for result in run_ranks(engine_body, world_size, path, dtype, timeout_s=500):
        calls = result["calls"]
        assert "unequal" not in calls and "miswritten" not in calls, calls
        met = ("equal", "written", "mixed", "continued", "preempted", "cached")
        assert all(calls[key] for key in met), calls
        assert bool(calls["windowed"]) == (kind in ("gemma2", "gpt_oss"))
        assert bool(calls["with sinks"]) == (kind == "gpt_oss")
        assert result["restored"]
        tokens = result["tokens"]
        if dtype == "float32":
            assert tokens["plain"] == tokens["vllm"] == tokens["chunked"]


def config(**changed: Any) -> SimpleNamespace:
    model = SimpleNamespace(dtype=changed.get("dtype", torch.float32), is_mm_prefix_lm=False)
    transfer = changed.get("kv_transfer_config")
    return SimpleNamespace(model_config=model, kv_transfer_config=transfer)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"attn_type": "encoder_only"}, "encoder_only attention"),
        ({"attn_type": "encoder_decoder"}, "encoder_decoder attention"),
        ({"alibi_slopes": [0.5, 0.25]}, "ALiBi"),
        ({"dtype": torch.float16}, "dtype float16"),
        ({"kv_cache_dtype": "fp8"}, "a key-value cache of fp8"),
        ({"head_size": 40}, "head size 40"),
        ({"kv_transfer_config": object()}, "the transfer of key-value caches"),
    ],
)
def test_other_attention_is_refused_by_name(changed: dict[str, Any], message: str) -> None:
    from hybridengine.engine.exact import attention_backend

    arguments: dict[str, Any] = {
        "num_heads": 2,
        "head_size": 32,
        "scale": 1.0,
        "num_kv_heads": 1,
        "alibi_slopes": None,
        "sliding_window": None,
        "kv_cache_dtype": "auto",
    }
    engine_keys = {"dtype", "kv_transfer_config"} & changed.keys()
    engine = config(**{key: changed[key] for key in engine_keys})
    arguments |= {key: value for key, value in changed.items() if key not in engine_keys}
    with (
        patch.object(attention_backend, "get_current_vllm_config", lambda: engine),
        pytest.raises(UserError, match=f"uses {message}.*, which is not supported"),
    ):
        attention_backend.ExactAttention(**arguments)


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_sinks_of_the_model_are_in_the_softmax(dtype: torch.dtype) -> None:
    """Also after a sync, which writes the parameter; the bits are those of the trainer."""
    from hybridengine.engine.exact import attention_backend as backend
    from hybridengine.kernels import tree_attention

    sinks = torch.nn.Parameter(torch.tensor([0.5, -1.0]).to(dtype), requires_grad=False)
    engine = config(dtype=dtype)
    with patch.object(backend, "get_current_vllm_config", lambda: engine):
        attention = backend.ExactAttention(2, 32, 0.3, 1, None, 7, "auto", sinks=sinks)
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(20, n, 32, generator=generator).to(dtype) for n in (2, 1, 1))
    cache, slots = torch.zeros(2, 1, 16, 64, dtype=dtype), torch.arange(20)
    attention.do_kv_cache_update(None, key, value, cache, slots)  # type: ignore[arg-type]
    starts, lengths, table = (torch.tensor(x).int() for x in ([0, 20], [20], [[0, 1]]))
    batch = backend.ExactMetadata(20, starts, lengths, table, slots)
    for values in ([0.5, -1.0], [2.0, 3.0]):
        sinks.copy_(torch.tensor(values))
        out = torch.empty(20, 64, dtype=dtype)
        attention.forward(None, query, key, value, cache, batch, out)
        options = {"sinks": torch.tensor(values), "softmax_scale": 0.3, "window_size": 7}
        expected = tree_attention(query, key, value, torch.full((20,), 20), slots, **options)
        assert torch.equal(out.view_as(expected), expected)
