"""A base that is the FP8 weights of the engine, dequantized layer by layer."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from hybridengine.run.config import ConfigError, load_config
from tests.model.lora_shared import load_adapted
from tests.ranks import run_ranks
from tests.sync.quantized_cases import save
from tests.sync.quantized_kernel import register_kernel
from tests.sync.vllm_engines import PROMPTS, build_engine
from tests.tensors import part
from tests.train.in_process import small_job
from tests.train.toy import metrics_of

pytest.importorskip("vllm", reason="the rollout engine; `make setup` installs it")

FP8 = (
    "model.lora_rank=3",
    "reshard.lora=adapters",
    "rollout.name=vllm",
    "rollout.kv_cache_gib=0.0625",
    "rollout.enforce_eager=true",
    "rollout.quantization=fp8",
    "rollout.dtype=bfloat16",
    "actor.fsdp_config.dtype=bfloat16",
)
SHARE = "model.share_engine_weights=true"


def dequantized(engine: Any, checkpoint: Any) -> dict[str, torch.Tensor]:
    """Return the parameters by products of float64, rounded to float32."""
    layout, weights, full = engine.target.layout, {}, engine.target.weights()
    for name, quantized in layout.quantized.items():
        n, k = full[name].shape
        scale = full[quantized.scale].double().repeat_interleave(128, 0).repeat_interleave(128, 1)
        weights[name] = (full[name].double() * scale[:n, :k]).float()
    values = {}
    for copy in layout.copies:
        tensor = weights.get(copy.destination, full[copy.destination])
        value = torch.empty(checkpoint.parameters[copy.source])
        part = tensor.as_strided(copy.sizes, copy.destination_strides, copy.destination_offset)
        value.as_strided(copy.sizes, copy.source_strides, copy.source_offset).copy_(part)
        values[copy.source] = value
    return values


def body(rank: int, world_size: int, path: str, checkpointing: bool) -> dict:
    from transformers import AutoModelForCausalLM

    from hybridengine.kernels.block_quantize import block_quantize
    from hybridengine.model import pack_rollouts, packed_log_probs
    from hybridengine.model.shared_parameters import full_base

    dtype = torch.bfloat16  # vLLM quantizes this dtype and float16
    register_kernel()
    torch.compiler.set_stance("force_eager")  # vLLM compiles its quantization, not when it reloads
    engine, checkpoint = build_engine(path, 1, dtype, lora_rank=3, quantization="fp8")
    layout = engine.target.layout
    engine_tensors = engine.target.weights()
    memory = engine.share_weights(dtype)
    engine.target.layout, shared_layout = layout, engine.target.layout
    for name in layout.quantized:
        engine_tensors[name].view(torch.uint8).fill_(1)

    load = partial(load_adapted, path, world_size, dtype, checkpointing)
    shared = load(base_memory=memory)
    values = dequantized(engine, checkpoint)
    plain = AutoModelForCausalLM.from_pretrained(path, dtype=dtype).state_dict()
    own = engine_tensors["model.layers.1.self_attn.qkv_proj.weight"]
    parts = [plain[f"model.layers.1.self_attn.{x}_proj.weight"] for x in "qkv"]
    reference = {name: torch.empty_like(tensor) for name, tensor in memory.items()}
    for name, tensor in reference.items():
        tensor.untyped_storage().resize_(tensor.nbytes)
        tensor.copy_(values[name])
    expected = load(base_memory=reference)
    with torch.no_grad():
        for name, tensor in reference.items():
            tensor.copy_(values[name])
    draw = torch.Generator().manual_seed(1)
    for a, b in zip(shared.parameters(), expected.parameters(), strict=True):
        if a.requires_grad:
            value = torch.randn(part(a).shape, generator=draw)
            part(a.detach()).copy_(value)
            part(b.detach()).copy_(value)

    def outcome(model: Any) -> list[torch.Tensor]:
        batch = pack_rollouts([(prompt, [4, 5, 6 + rank, 9]) for prompt in PROMPTS])
        log_probs, entropy = packed_log_probs(model, batch)
        (log_probs.mean() + 0.01 * entropy.mean()).backward()
        gradients = [part(p.grad) for p in model.parameters() if p.grad is not None]
        return [log_probs.detach(), *gradients]

    pairs = zip(outcome(shared), outcome(expected), strict=True)
    unequal = [i for i, (a, b) in enumerate(pairs) if not torch.equal(a, b)]
    left = [n for n in memory.sliced if memory[n].untyped_storage().nbytes()]
    differing = []
    for name in memory:
        with full_base(shared, name):
            if not torch.equal(memory[name], values[name].to(dtype)):
                differing.append(name)
    return {
        "unequal": unequal,
        "differing": differing,
        "quantized": torch.equal(
            own.view(torch.uint8), block_quantize(torch.cat(parts))[0].view(torch.uint8)
        ),
        "left": left,
        "joined": len(memory.sliced),
        "synced": sorted(shared_layout.destinations),
    }


@pytest.mark.multirank
@pytest.mark.parametrize(
    ("world_size", "checkpointing"),
    [(2, True), pytest.param(1, False, marks=pytest.mark.exhaustive)],
)
def test_log_probs_and_gradients_are_those_of_dequantized_weights(
    tmp_path: Path, world_size: int, checkpointing: bool
) -> None:
    """Blocks contain rows of q and k, and widths are no multiple of a block."""
    arguments = (save(tmp_path), checkpointing)
    for result in run_ranks(body, world_size, *arguments, timeout_s=300):
        assert result == {
            "unequal": [],
            "differing": [],
            "quantized": True,
            "left": [],
            "joined": 14,
            "synced": [],
        }


def job_body(rank: int, world_size: int, folder: Path, overrides: list[str]) -> None:
    from hybridengine.run.session import PhaseStatus, Session
    from hybridengine.train.preflight import check_job
    from hybridengine.train.rl import RLTrainer

    register_kernel()
    torch.compiler.set_stance("force_eager")
    config = load_config(None, overrides)
    check_job(config)
    RLTrainer(config, Session(PhaseStatus(folder, rank))).train()


@pytest.mark.multirank
def test_a_job_resumes_and_exports_what_it_was_trained_with(tmp_path: Path) -> None:
    """A run of four steps, and one of two that is resumed for two more, have the same results."""
    job = [*small_job(tmp_path), *FP8, SHARE, "actor.use_kl_loss=true", "trainer.save_freq=2"]

    def run(name: str, steps: int) -> None:
        settings = {
            "trainer.total_training_steps": steps,
            "trainer.resume_mode": "auto",
            "trainer.default_local_dir": tmp_path / name,
        }
        overrides = [*job, *(f"{key}={value}" for key, value in settings.items())]
        run_ranks(job_body, 1, tmp_path / name, overrides, timeout_s=300)

    run("full", 4)
    run("resumed", 2)
    run("resumed", 4)
    rows = [metrics_of(tmp_path / name) for name in ("full", "resumed")]
    assert rows[0] == rows[1] and len(rows[0]) == 4
    assert rows[0][0]["actor/kl_loss"] == 0 and rows[0][-1]["actor/kl_loss"] > 0
    for file in ("final/model.safetensors", "final_adapter/adapter_model.safetensors"):
        full, resumed = (load_file(tmp_path / name / file) for name in ("full", "resumed"))
        assert full and all(torch.equal(x, resumed[name]) for name, x in full.items())


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("model.lora_rank=0", "reshard.lora=merged"), "model.lora_rank is 0"),
        (
            ("rollout.tensor_model_parallel_size=2", "trainer.n_gpus_per_node=2"),
            "rollout.tensor_model_parallel_size is 2",
        ),
    ],
)
def test_what_cannot_be_dequantized_is_named(
    tmp_path: Path, overrides: tuple[str, ...], message: str
) -> None:
    from hybridengine.train.choices import decide

    job = [*small_job(tmp_path), *FP8, *overrides, SHARE]
    expected = f"share_engine_weights is on, but rollout.quantization is fp8, and {message}"
    with pytest.raises(ConfigError, match=expected):
        decide(load_config(None, job))


def test_auto_gathers_the_values_of_the_checkpoint(tmp_path: Path) -> None:
    from hybridengine.train.choices import decide

    job = [*small_job(tmp_path), *FP8]
    choices = decide(load_config(None, job))
    assert not choices.shares and "would be the engine's weights" in choices.reasons["shares"]
    assert decide(load_config(None, [*job, SHARE])).shares
