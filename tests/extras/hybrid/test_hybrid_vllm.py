"""Gated DeltaNet in vLLM on a CPU, which packs convolutions: after syncs as one freshly loaded."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from hybridengine.run.config import load_config
from hybridengine.train.choices import decide
from tests.engines import build_engine
from tests.extras.hybrid.hybrid_models import hybrid_config, hybrid_models
from tests.model.lora_shared import float64_update
from tests.ranks import run_ranks
from tests.sync.vllm_engines import build_llm
from tests.tensors import part, whole

pytestmark = pytest.mark.multirank
pytest.importorskip("vllm", reason="the rollout engine; `make setup` installs it")

LONG = [5, 9, 33, 2] * 600  # longer than a block, which holds a state: its prefix is cached
PROMPTS = [[1, 5, 9, 33, 2], [7, 8, 9, 10, 11, 12, 13], [3], LONG, LONG]
CHANGES = dict(linear_key_head_dim=128, linear_value_head_dim=128, max_position_embeddings=4096)


def convolutions(llm) -> dict[str, torch.Tensor]:
    """Weights of all convolutions as vLLM's kernels read them."""
    runner = llm.llm_engine.model_executor.driver_worker.worker.model_runner
    return {
        f"{name}.{key}": getattr(module, key).detach().clone()
        for name, module in runner.get_model().named_modules()
        if name.endswith("conv1d")
        for key in ("weight", "_cpu_unpacked_conv_weight")
        if hasattr(module, key)
    }


def clones(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in tensors.items()}


def log_prob_differences(reference, responses) -> list[float]:
    """Between those of transformers and of the engine, of responses to PROMPTS."""
    differences = []
    for prompt, (response,) in zip(PROMPTS, responses, strict=True):
        ids = response.token_ids
        with torch.no_grad():
            logits = reference(torch.tensor([[*prompt, *ids]])).logits[0, len(prompt) - 1 : -1]
        own = logits.float().log_softmax(-1)[range(len(ids)), ids]
        differences += (own - torch.tensor(response.log_probs)).abs().tolist()
    return differences


def trained_body(
    rank: int,
    world_size: int,
    folder: str,
    settings: dict[str, Any],
    lora: str = "",
    dtype: torch.dtype = torch.bfloat16,
):
    """Sync, generate and sleep three times, changing a few weights, then all, in between.

    settings: of the group rollout. lora: whether adapters are trained, "merged" or in a "slot".

    Returns (convolutions, differences of log-probs to transformers', dtypes of states, which syncs
    were deltas, what vLLM's own loader writes otherwise).
    """
    from hybridengine.engine.interface import SamplingSpec
    from hybridengine.model import frozen_parameters, parameter_shards, sharding_mesh
    from hybridengine.model.lora import adapter_shards, apply_lora
    from hybridengine.sync.resharder import Resharder
    from tests.loading import load_sharded

    engine = build_engine(
        "vllm",
        folder,
        dtype=str(dtype).removeprefix("torch."),
        tensor_model_parallel_size=world_size,
        kv_cache_gib=64 / 1024,
        max_model_len=4096,
        adapter_rank=4 if lora == "slot" else 0,
        **settings,
    )
    adapt = (lambda model: apply_lora(model, 4, 8.0)) if lora else None
    model = load_sharded(folder, mesh=sharding_mesh("cpu", world_size), adapt=adapt)
    resharder = Resharder(
        lambda: parameter_shards(model),
        engine,
        1 << 20,
        lambda: adapter_shards(model),
        delta="on",
        merge=lora != "slot",
        frozen=lambda: frozen_parameters(model),
    )
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    differences, deltas, unequal = [], [], set[str]()
    for version in (1, 2, 3):
        deltas.append(resharder.sync(version, verify=True).delta)
        trained = {name: whole(p).detach() for name, p in parameter_shards(model).items()}
        for name, adapter in adapter_shards(model).items():
            trained[name] = (trained[name].double() + float64_update(adapter.full())).float()
        reference.load_state_dict(trained, strict=False)
        responses = engine.generate(PROMPTS, SamplingSpec(max_tokens=16), seed=version)
        differences += log_prob_differences(reference, responses)
        if lora != "slot":
            held = convolutions(engine.llm) | clones(engine.target.weights())
            engine.target.load_full(trained.items())
            loaded = convolutions(engine.llm) | engine.target.weights()
            unequal |= {name for name, x in held.items() if not torch.equal(x, loaded[name])}
        engine.sleep()
        if version < 3:
            with torch.no_grad():
                for parameter in filter(lambda p: p.requires_grad, model.parameters()):
                    values = part(parameter).flatten()
                    values[:: 50 if version == 1 else 1] *= 1.1
                    part(parameter).copy_(values.view_as(part(parameter)))
                    if lora:
                        parameter.add_(0.01)
    if rank == 0:
        reference.save_pretrained(f"{folder}/trained")
    runner = engine.llm.llm_engine.model_executor.driver_worker.worker.model_runner
    layers = runner.compilation_config.static_forward_context.values()
    states = {layer.kv_cache[1].dtype for layer in layers if hasattr(layer, "conv1d")}
    return convolutions(engine.llm), torch.tensor(differences), states, deltas, sorted(unequal)


def loaded_body(rank: int, world_size: int, folder: str) -> dict[str, torch.Tensor]:
    """vLLM alone, from what was trained."""
    from hybridengine.engine.vllm.environment import (
        models_inspected_here,
        prepare_environment,
        unique_shared_memory,
    )

    prepare_environment()
    from vllm import LLM

    with unique_shared_memory(), models_inspected_here():
        llm = LLM(
            model=f"{folder}/trained",
            dtype="bfloat16",
            distributed_executor_backend="external_launcher",
            tensor_parallel_size=world_size,
            max_model_len=64,
            skip_tokenizer_init=True,
            kv_cache_memory_bytes=64 << 20,
            enforce_eager=True,
        )
    return convolutions(llm)


WITH_CACHE = dict(enable_prefix_caching=True, max_num_batched_tokens=1024)  # long prompts in chunks
NO_CACHE = dict(enable_prefix_caching=False, max_num_batched_tokens=1024)
NO_CHUNKS = dict(enable_prefix_caching=False, enable_chunked_prefill=False)


@pytest.mark.parametrize(
    ("kind", "tp_size", "settings"), [("qwen3_5_text", 1, WITH_CACHE), ("qwen3_next", 2, NO_CHUNKS)]
)
def test_synced_engine_is_as_one_loaded(
    tmp_path: Path, kind: str, tp_size: int, settings: dict[str, Any]
) -> None:
    hybrid_models(kind, **CHANGES)[1].save_pretrained(tmp_path)
    synced = run_ranks(trained_body, tp_size, str(tmp_path), settings, timeout_s=500)
    loaded = run_ranks(loaded_body, tp_size, str(tmp_path), timeout_s=500)
    for (convs, differences, states, deltas, unequal), expected in zip(synced, loaded, strict=True):
        assert convs.keys() == expected.keys() and convs
        assert all(torch.equal(convs[name], expected[name]) for name in convs)
        assert states == {torch.float32} and deltas == [False, True, False] and not unequal
        assert differences.median() < 0.03  # convolutions in another layout: above 1


@pytest.mark.parametrize(("kind", "lora"), [("qwen3_5_text", "slot"), ("qwen3_next", "merged")])
def test_adapters_arrive(tmp_path: Path, kind: str, lora: str) -> None:
    """Of the projections of Gated DeltaNet, too."""
    hybrid_models(kind, **CHANGES)[1].save_pretrained(tmp_path)
    (result,) = run_ranks(trained_body, 1, str(tmp_path), NO_CHUNKS, lora, timeout_s=500)
    assert result[1].median() < 0.03


@pytest.mark.parametrize("kind", ["falcon_h1", pytest.param("lfm2", marks=pytest.mark.exhaustive)])
def test_mamba2_and_short_convolutions(tmp_path: Path, kind: str) -> None:
    """In float32: LFM2 without all heads rotated is off by 0.002."""
    hybrid_models(kind, max_position_embeddings=4096)[1].save_pretrained(tmp_path)
    arguments = str(tmp_path), NO_CACHE, "", torch.float32
    ((_, differences, states, _, unequal),) = run_ranks(trained_body, 1, *arguments, timeout_s=500)
    assert not unequal and states <= {torch.float32}
    assert differences.median() < 1e-4


def connected_body(rank: int, world_size: int, folder: str) -> dict[str, torch.Tensor]:
    """A trainer's sync into a plain `LLM`; the trained model is saved as well."""
    from torch.distributed.fsdp import fully_shard

    from hybridengine.integrations.vllm import connect

    llm = build_llm(folder, max_model_len=64, kv_cache_memory_bytes=64 << 20)
    model = AutoModelForCausalLM.from_pretrained(folder)
    connected = connect(fully_shard(model), llm)
    for _ in range(2):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.1)
        connected.sync(verify=True)
    trained = AutoModelForCausalLM.from_pretrained(folder)
    trained.load_state_dict({n: whole(p) for n, p in model.named_parameters()}, strict=False)
    trained.save_pretrained(f"{folder}/trained")
    return convolutions(llm)


def test_plain_engines_of_other_trainers_follow(tmp_path: Path) -> None:
    hybrid_models("qwen3_5_text", **CHANGES)[1].save_pretrained(tmp_path)
    (synced,) = run_ranks(connected_body, 1, str(tmp_path), timeout_s=500)
    (loaded,) = run_ranks(loaded_body, 1, str(tmp_path), timeout_s=500)
    assert synced.keys() == loaded.keys() and synced
    assert all(torch.equal(synced[name], loaded[name]) for name in synced)


def test_the_plan_states_the_type_of_states() -> None:
    needed = ["model.path=m", "data.train_files=t.jsonl", "rollout.dtype=bfloat16"]
    for name, is_stated in (("vllm", True), ("hf", False)):
        config = load_config(None, [*needed, f"rollout.name={name}"])
        choices = decide(config, hybrid_config("qwen3_5_text", **CHANGES))
        assert ("engine's SSM states float32" in choices.reasons["dtypes"]) == is_stated
