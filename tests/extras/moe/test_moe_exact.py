"""rollout.exact of mixtures: the log-probs of engine and trained model are the same bits."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from hybridengine.engine.vllm.environment import vllm_available
from hybridengine.kernels.merged_linear import merge_adapter
from hybridengine.model import adapter_shards, apply_lora, pack_rollouts, packed_log_probs
from hybridengine.model.attention import ATTENTION
from hybridengine.model.exact import use_exact_operators
from hybridengine.model.extensions import prepare_model
from hybridengine.model.head import patch_head
from hybridengine.moe.experts import ExactExperts, HeldExperts, grouped_experts
from hybridengine.moe.routers import router_blocks
from hybridengine.run.config import load_config
from hybridengine.run.errors import ModelError
from hybridengine.train.choices import decide
from tests.engine.exact_bits import differing_operators
from tests.engine.exact_engines import compare_under_pressure, open_engine, open_model
from tests.extras.moe.exact_mixtures import KINDS, mixture_config
from tests.extras.moe.moe_models import ARCHITECTURES, tiny_moe
from tests.ranks import run_ranks
from tests.tiny_models import save_characters, save_tiny
from tests.train.exact_job import VLLM, train
from tests.train.in_process import lines_of, moe_job

LONG = pytest.mark.exhaustive
needs_vllm = pytest.mark.skipif(
    not vllm_available(), reason="the rollout engine; `make setup` installs it"
)
TOKENS = 150
SHORT = ("qwen3_moe", "gpt_oss", "deepseek_v3")
LATENT = ("deepseek_v2", "deepseek_v3", "glm4_moe_lite")


def exact_block(kind: str, dtype: torch.dtype) -> tuple[Any, Any]:
    """Return a block of a tiny model with exact operators, and the same one without, in float64."""
    options = ARCHITECTURES[kind] | {"num_experts_per_tok": 4}
    if "n_group" in options:
        options |= {"n_group": 4, "topk_group": 2}
    model: Any = tiny_moe(kind, **options)
    for name, parameter in model.named_parameters():
        if name.endswith("_bias"):  # of experts: zeros
            parameter.data.normal_(generator=torch.Generator().manual_seed(3))
    model.to(dtype)
    plain = copy.deepcopy(model).double()
    plain.set_experts_implementation("eager")
    use_exact_operators(model, {})
    block, oracle = ([b for _, b, _ in router_blocks(m)][-1] for m in (model, plain))
    return block, oracle


def first(out: Any) -> Tensor:
    result: Tensor = out[0] if isinstance(out, tuple) else out
    return result


def inputs(dtype: torch.dtype, tokens: int = TOKENS) -> Tensor:
    return torch.randn(1, tokens, 64, generator=torch.Generator().manual_seed(1)).to(dtype)


@pytest.mark.parametrize("kind", ["qwen3_moe", "qwen3_5_moe_text", "glm4_moe", "gpt_oss"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_tokens_bits_depend_on_its_row_alone(kind: str, dtype: torch.dtype) -> None:
    block, oracle = exact_block(kind, dtype)
    x = inputs(dtype)
    with torch.no_grad():
        together = first(block(x))
        threads = torch.get_num_threads()
        for count, size in ((1, 1), (1, 7), (3, 64), (3, TOKENS)):
            torch.set_num_threads(count)
            parts = [first(block(part)) for part in x.split(size, 1)]
            assert torch.equal(torch.cat(parts, 1), together), (count, size)
        torch.set_num_threads(threads)
        error = (together.double() - first(oracle(x.double()))).abs().max()
    assert error < (1e-5 if dtype is torch.float32 else 0.05) * together.abs().max()


def test_of_equal_scores_those_with_the_lowest_indices_are_selected() -> None:
    block, _ = exact_block("qwen3_moe", torch.float32)
    selected: list[Tensor] = []
    block.gate.register_forward_hook(lambda module, args, out: selected.append(out[2]))
    with torch.no_grad():
        block.gate.weight[2:7] = block.gate.weight[2]
        block(inputs(torch.float32))
    (rows,) = selected
    alike = (rows >= 2) & (rows < 7)
    count = alike.sum(1)
    assert (count > 1).any() and (count < 4).any()
    for row, mask in zip(rows, alike, strict=True):
        assert row[mask].tolist() == list(range(2, 2 + int(mask.sum())))


@pytest.mark.parametrize("kind", ["qwen3_moe", "gpt_oss"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_slices_of_the_experts_give_the_bits_of_the_experts(kind: str, dtype: torch.dtype) -> None:
    """Two engine ranks, each with half of the width of all experts, against the trainer."""
    block, oracle = exact_block(kind, dtype)
    activation = None if kind == "gpt_oss" else "silu"
    # Small values: gpt_oss clamps others, where a gradient jumps.
    x = (inputs(dtype)[0] / 2).requires_grad_()
    generator = torch.Generator().manual_seed(2)
    weights = torch.rand(TOKENS, 4, generator=generator)
    index = torch.rand(TOKENS, 8, generator=generator).argsort(1)[:, :4]
    together = grouped_experts(block.experts, x, index, weights, ExactExperts(activation, 2))
    sums: list[Tensor] = []

    def collect(part: Tensor) -> Tensor:
        sums.append(part)
        return torch.stack(sums)

    with torch.no_grad():
        for rank in range(2):
            half, exact = half_of(block.experts, rank), ExactExperts(activation, 1, collect)
            joined = grouped_experts(half, x, index, weights, exact)
    assert torch.equal(joined, together)
    wide = x.detach().double().requires_grad_()
    expected = oracle.experts(wide, index, weights.double())
    limit = 1e-5 if dtype is torch.float32 else 0.05
    assert (together - expected).abs().max() < limit * expected.abs().max()
    grad = torch.randn(expected.shape, generator=generator)
    together.backward(grad.to(dtype))
    expected.backward(grad.double())
    gradients = [(x.grad, wide.grad)]
    gradients += [
        (p.grad, oracle.experts.get_parameter(n).grad) for n, p in block.experts.named_parameters()
    ]
    for ours, theirs in gradients:
        assert ours is not None and theirs is not None
        assert (ours - theirs).abs().max() < limit * theirs.abs().max()


def test_ranks_that_have_some_experts_give_the_bits_of_all() -> None:
    """Two engine ranks, each with half of the experts; one of them is never selected."""
    block, _ = exact_block("qwen3_moe", torch.bfloat16)
    x, generator = inputs(torch.bfloat16)[0], torch.Generator().manual_seed(2)
    weights = torch.rand(TOKENS, 4, generator=generator)
    index = torch.rand(TOKENS, 7, generator=generator).argsort(1)[:, :4]
    rows: list[Tensor] = []

    def collect(part: Tensor) -> Tensor:
        rows.append(part)
        return torch.stack([*rows, part][:2])

    with torch.no_grad():
        together = grouped_experts(block.experts, x, index, weights, ExactExperts("silu"))
        for rank in range(2):
            held = HeldExperts(range(4 * rank, 4 * rank + 4), collect)
            own = copy.deepcopy(block.experts)
            for name, weight in block.experts.named_parameters():
                setattr(own, name, nn.Parameter(weight[4 * rank : 4 * rank + 4]))
            joined = grouped_experts(own, x, index, weights, ExactExperts("silu", held=held))
    assert torch.equal(joined, together)


def half_of(experts: Any, rank: int) -> Any:
    """Return the experts that have one of two halves of the width."""
    half = copy.deepcopy(experts)
    if experts.has_bias:  # rows of gate and up take turns, and weights are transposed
        half.is_transposed, second = False, experts.down_proj_bias.data * (rank == 0)
        rows = experts.gate_up_proj.data.chunk(2, 2)[rank].transpose(1, 2).contiguous()
        columns = experts.down_proj.data.chunk(2, 1)[rank].transpose(1, 2).contiguous()
        half.gate_up_proj, half.down_proj = nn.Parameter(rows), nn.Parameter(columns)
        half.gate_up_proj_bias = nn.Parameter(experts.gate_up_proj_bias.data.chunk(2, 1)[rank])
        half.down_proj_bias = nn.Parameter(second)
        return half
    gate, up = experts.gate_up_proj.data.chunk(2, 1)
    gate_up = torch.cat([gate.chunk(2, 1)[rank], up.chunk(2, 1)[rank]], 1)
    half.gate_up_proj = nn.Parameter(gate_up)
    half.down_proj = nn.Parameter(experts.down_proj.data.chunk(2, 2)[rank].contiguous())
    return half


def test_experts_without_an_exact_form_are_refused() -> None:
    with pytest.raises(ModelError, match="experts without a gate"):
        use_exact_operators(tiny_moe("nemotron_h", **ARCHITECTURES["nemotron_h"]), {})
    model: Any = tiny_moe("gpt_oss", **ARCHITECTURES["gpt_oss"])
    gate = patch.object(
        type(model.model.layers[0].mlp.experts), "_apply_gate", lambda _, x: x.softmax(1)
    )
    with gate, pytest.raises(ModelError, match="has a gate that calls softmax"):
        use_exact_operators(model, {})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_merged_adapters_have_the_bits_of_merged_weights(kind: str, dtype: torch.dtype) -> None:
    """Of all linear layers: of attention, also of latent one, and of shared experts."""
    torch.manual_seed(0)
    config = mixture_config(kind)
    adapted = AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION, dtype=dtype)
    plain = copy.deepcopy(adapted)
    apply_lora(adapted, 4, 6.0)
    for name, parameter in adapted.named_parameters():
        if "lora_" in name:
            parameter.data = torch.randn_like(parameter, dtype=dtype) * 0.1
    with torch.no_grad():
        for name, adapter in adapter_shards(adapted).items():
            weight = plain.get_parameter(name)
            weight.copy_(merge_adapter(weight, adapter.left, adapter.right, adapter.scale))
    batch = pack_rollouts([([3, 4, 5], [6, 7, 8, 9]), ([13, 14], [15, 16, 17])])
    found = []
    for model, merged_in in ((adapted, dtype), (plain, None)):
        prepare_model(model)
        use_exact_operators(model, {}, merged_in)
        patch_head(model)
        found.append(packed_log_probs(model.eval(), batch)[0])
    assert torch.equal(*found)
    found[0].sum().backward()
    grads = [p.grad for p in adapted.parameters() if p.requires_grad]
    assert all(grad is not None and grad.isfinite().all() for grad in grads)


def compare(rank: int, world_size: int, folder: str, dtype: str) -> None:
    # A small cache: prefixes are shared, prompts come in chunks of at most 48 tokens beside
    # decoding sequences, and running sequences are preempted.
    tokens = 20 * 16 * (4 if dtype == "float32" else 2)
    options: dict[str, Any] = {"max_num_batched_tokens": 48}
    if "3_5" in folder:
        options |= {
            "mamba_ssm_cache_dtype": "float32",
            "kv_cache_memory_bytes": 16 << 14,
        }
    else:  # latent attention has four heads of 48, and values of as many
        of_heads = 4 * 48 if Path(folder).name in LATENT else 2 * 32
        options |= {"kv_cache_memory_bytes": tokens * 2 * 2 * of_heads}
    *_, under_pressure = compare_under_pressure(folder, dtype, shared=40, **options)
    # With states: test_hybrid_exact.py; sliding windows free blocks.
    assert under_pressure or "3_5" in folder or "gpt_oss" in folder


@needs_vllm
@pytest.mark.multirank
@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        (kind, dtype)
        if kind in SHORT or (kind, dtype) == ("glm4_moe", "bfloat16")
        else pytest.param(kind, dtype, marks=LONG)
        for kind in KINDS
        for dtype in ("float32", "bfloat16")
    ],
)
def test_log_probs_are_the_same_bits(tmp_path: Path, kind: str, dtype: str) -> None:
    """Of weights in float32, which vLLM keeps of some routers, and a trained model rounds."""
    path = save_tiny(mixture_config(kind), tmp_path / kind)
    run_ranks(compare, 1, path, dtype, timeout_s=300)


def find_faults(rank: int, world_size: int, folder: str, names: list[str]) -> None:
    llm = open_engine(folder, "float32", kv_cache_memory_bytes=1 << 20)
    model = open_model(folder, "float32")
    prompt = list(range(3, 40))
    assert differing_operators(model, llm, prompt) == []
    for name in names:  # the last operator first: it hides none before it
        parameter = model.get_parameter(name)
        with torch.no_grad():
            parameter *= 1.01
        found = differing_operators(model, llm, prompt)[0]
        point = name.removesuffix(".weight").removesuffix(".down_proj_bias")
        assert found.startswith(f"{point.removesuffix('.down_proj')}: "), found


@LONG
@needs_vllm
@pytest.mark.multirank
@pytest.mark.parametrize(
    ("kind", "names"),
    [
        ("qwen2_moe", ["mlp.experts.down_proj"]),
        ("gpt_oss", ["mlp.experts.down_proj_bias", "self_attn.k_proj.weight"]),
        ("deepseek_v3", ["mlp.experts.down_proj", "self_attn.kv_b_proj.weight"]),
    ],
)
def test_the_first_operator_that_differs(tmp_path: Path, kind: str, names: list[str]) -> None:
    path = save_tiny(mixture_config(kind), tmp_path)
    run_ranks(find_faults, 1, path, [f"model.layers.1.{name}" for name in names], timeout_s=200)


def test_replay_of_the_engines_routes_is_not_exact(tmp_path: Path) -> None:
    job = [*moe_job(tmp_path), *VLLM, f"model.path={save_tiny('qwen3_moe', tmp_path / 'q')}"]
    assert decide(load_config(None, job)).exact
    choices = decide(load_config(None, [*job, "actor.router_replay=rollout"]))
    assert not choices.exact
    assert "an exact engine records no routes" in choices.reasons["exact"]


@needs_vllm
@pytest.mark.multirank
@pytest.mark.parametrize(
    ("kind", "tp_size", "expert_parallel", "dtype"),
    [
        ("qwen3_moe", 2, 2, "bfloat16"),
        ("gpt_oss", 2, 1, "bfloat16"),
        *(pytest.param(kind, 2, 1, "float32", marks=LONG) for kind in KINDS),
        *(
            pytest.param(kind, tp_size, 1, "bfloat16", marks=LONG)
            for kind in KINDS
            for tp_size in (1, 2)
            if (kind, tp_size) != ("gpt_oss", 2)
        ),
    ],
)
def test_jobs(tmp_path: Path, kind: str, tp_size: int, expert_parallel: int, dtype: str) -> None:
    check_job(tmp_path, kind, tp_size, expert_parallel, dtype)


@LONG
@needs_vllm
@pytest.mark.multirank
@pytest.mark.parametrize(("kind", "dtype"), [("qwen2_moe", "bfloat16"), ("glm4_moe", "float32")])
def test_engines_that_divide_experts(tmp_path: Path, kind: str, dtype: str) -> None:
    argument = "rollout.engine_kwargs.vllm.enable_expert_parallel=true"
    check_job(tmp_path, kind, 2, 1, dtype, argument, "rollout.exact=on")


@needs_vllm
@pytest.mark.multirank
@pytest.mark.parametrize(
    ("kind", "tp_size", "dtype"),
    [
        ("glm4_moe", 2, "bfloat16"),
        *(
            pytest.param(kind, tp_size, dtype, marks=LONG)
            for kind in KINDS
            for tp_size, dtype in ((1, "float32"), (1, "bfloat16"), (2, "bfloat16"))
            if (kind, tp_size) != ("glm4_moe", 2)
        ),
    ],
)
def test_merged_adapters(tmp_path: Path, kind: str, tp_size: int, dtype: str) -> None:
    """Of all linear layers: those of attention and of shared experts."""
    adapters = ("model.lora_rank=4", "model.lora_alpha=6", "reshard.lora=merged")
    check_job(tmp_path, kind, tp_size, 1, dtype, *adapters)


def check_job(
    tmp_path: Path, kind: str, tp_size: int, expert_parallel: int, dtype: str, *more: str
) -> None:
    """Two steps on two ranks with shared prompts and recomputed layers."""
    path = save_tiny(mixture_config(kind), tmp_path / kind)
    save_characters(path)
    job = [
        *more,
        *moe_job(tmp_path),
        *VLLM,
        f"model.path={path}",
        f"rollout.tensor_model_parallel_size={tp_size}",
        f"actor.fsdp_config.dtype={dtype}",
        f"actor.fsdp_config.expert_parallel_size={expert_parallel}",
        "trainer.n_gpus_per_node=2",
        "trainer.total_training_steps=2",
        "data.max_prompt_length=20",
        "data.max_response_length=16",
        "reward.custom_reward_function.name=hashed",
        "actor.ppo_max_token_len_per_gpu=128",
        "model.enable_gradient_checkpointing=true",
    ]
    for _, holds in run_ranks(train, 2, tmp_path, job, timeout_s=500):
        assert holds and all(holds)
    rows = [row for row in lines_of(tmp_path / "run" / "metrics.jsonl") if "actor/grad_norm" in row]
    assert len(rows) == 2
    for row in rows:
        assert row["training/rollout_probs_diff_max"] == 0.0
        assert row["rollout_corr/rollout_is_max"] == row["training/rollout_ratio_mean"] == 1.0
