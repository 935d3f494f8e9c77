"""FSDP2 ranks → real vLLM with FP8 weights: what arrives is what vLLM's own loader quantizes."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import pytest
import torch

from tests.extras.remote.worlds import link_store, worlds
from tests.ranks import message_of, run_ranks
from tests.sync.quantized_cases import save
from tests.sync.quantized_kernel import register_kernel
from tests.sync.vllm_engines import PROMPTS, build, build_engine

pytestmark = pytest.mark.multirank
pytest.importorskip("vllm", reason="the rollout engine; `make setup` installs it")


def load_again(engine, checkpoint: dict[str, torch.Tensor]) -> None:
    """Load bfloat16 weights through vLLM, which quantizes them as when it starts."""
    from vllm.model_executor.model_loader.reload import (
        finalize_layerwise_reload,
        initialize_layerwise_reload,
    )

    model = engine.model_runner.get_model()
    with torch.no_grad(), torch.device("cpu"):
        initialize_layerwise_reload(model)
        model.load_weights(iter(checkpoint.items()))
        finalize_layerwise_reload(model, engine.llm.llm_engine.model_config)


def unequal_to_vllms(engine, checkpoint: dict[str, torch.Tensor]) -> list[str]:
    """Return which of the engine's tensors differ from what vLLM itself makes of bfloat16 ones."""
    written = {name: tensor.clone() for name, tensor in engine.target.weights().items()}
    for tensor in engine.target.weights().values():
        tensor.view(torch.uint8).fill_(1)
    load_again(engine, checkpoint)
    return [
        name
        for name, tensor in engine.target.weights().items()
        if not torch.equal(tensor.view(torch.uint8), written[name].view(torch.uint8))
    ]


def sync_body(rank: int, world_size: int, path: str) -> dict:
    from hybridengine.engine.interface import SamplingSpec
    from hybridengine.model import parameter_shards

    register_kernel()
    torch.compiler.set_stance("force_eager")  # vLLM compiles its quantization, not when it reloads
    engine, model, resharder = build(path, 2, torch.bfloat16, 1 << 16, quantization="fp8")
    for version in (1, 2):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(-1.5).add_(0.01)
        report = resharder.sync(version, verify=True)
    written = {name: tensor.clone() for name, tensor in engine.target.weights().items()}
    checkpoint = {n: p.full_tensor().to(torch.bfloat16) for n, p in parameter_shards(model).items()}
    unequal = unequal_to_vllms(engine, checkpoint)
    outputs = engine.generate(PROMPTS, SamplingSpec(max_tokens=4), seed=0)
    return {
        "unequal": unequal,
        "quantized": sorted(engine.target.layout.quantized),
        "dtypes": {n: str(t.dtype) for n, t in written.items()},
        "received": report.bytes_received,
        "planned": resharder.plan.bytes_received[rank],
        # A ring's all-reduce of a number per block.
        "for_scales": 2 * resharder.mover.encoding.scale.nbytes * (world_size - 1) // world_size,
        "version": engine.weight_version,
        "responses": [len(o.token_ids) for completions in outputs for o in completions],
    }


def test_engine_tensors_equal_vllms_own_quantization(tmp_path: Path) -> None:
    for result in run_ranks(sync_body, 2, save(tmp_path), timeout_s=300):
        assert result["unequal"] == []
        layers = [f"model.layers.{i}." for i in range(2)]
        linear = ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj")
        names = {layer + name for layer in layers for name in linear}
        assert set(result["quantized"]) == {f"{n}.weight" for n in names}
        for name, dtype in result["dtypes"].items():
            scale, weight = name.endswith("_scale_inv"), name in result["quantized"]
            wanted = "float32" if scale else "float8_e4m3fn" if weight else "bfloat16"
            assert dtype == f"torch.{wanted}", name
        assert result["received"] == result["planned"] + result["for_scales"]
        assert result["version"] == 2
        assert result["responses"] == [4] * len(PROMPTS)


def load_trained(path: str):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)


def trainer_body(rank: int, world_size: int, port: int, path: str) -> int:
    from torch.distributed.fsdp import fully_shard

    from hybridengine.model import parameter_shards
    from hybridengine.remote.sync.sender import WeightSender

    model = load_trained(path)
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    sender = WeightSender(
        lambda: parameter_shards(model), link_store(port), num_engines=1, bucket_bytes=1 << 16
    )
    for version in (1, 2):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(-1.5).add_(0.01)
        report = sender.sync(version, verify=True)
    return report.bytes_sent


def engine_body(rank: int, world_size: int, port: int, path: str) -> dict:
    from hybridengine.engine.interface import SamplingSpec
    from hybridengine.remote.sync.receiver import WeightReceiver

    register_kernel()
    torch.compiler.set_stance("force_eager")  # vLLM compiles its quantization, not when it reloads
    engine, _ = build_engine(path, world_size, torch.bfloat16, quantization="fp8")
    receiver = WeightReceiver(engine, link_store(port), index=0)
    for _ in range(2):
        receiver.receive()
    outputs = engine.generate(PROMPTS, SamplingSpec(max_tokens=4), seed=0)
    checkpoint = load_trained(path).state_dict()
    for tensor in checkpoint.values():
        for _ in range(2):
            tensor.mul_(-1.5).add_(0.01)
    checkpoint = {name: tensor.to(torch.bfloat16) for name, tensor in checkpoint.items()}
    return {
        "unequal": unequal_to_vllms(engine, checkpoint),
        "quantized": len(engine.target.layout.quantized),
        "version": engine.weight_version,
        "responses": [len(o.token_ids) for completions in outputs for o in completions],
    }


def test_engines_in_other_processes_get_vllms_own_quantization(tmp_path: Path) -> None:
    path = save(tmp_path)
    bodies = (trainer_body, 2, path), (engine_body, 2, path)
    with worlds(*bodies, timeout_s=300) as (_, trainers, engine):
        of_trainers, of_engine = trainers.results(), engine.results()
    assert min(of_trainers) > 0
    for result in of_engine:
        assert result["unequal"] == [] and result["quantized"] == 8
        assert result["version"] == 2 and result["responses"] == [4] * len(PROMPTS)


def refused_body(rank: int, world_size: int, path: str) -> str:
    """What is said of a kernel that changes the scales of quantized weights, as DeepGEMM does."""
    from vllm.model_executor.kernels import linear
    from vllm.platforms import PlatformEnum

    register_kernel()
    torch.compiler.set_stance("force_eager")  # vLLM compiles its quantization, not when it reloads
    (kernel,) = linear._POSSIBLE_FP8_BLOCK_KERNELS[PlatformEnum.CPU]
    process = kernel.process_weights_after_loading

    def to_powers_of_two(self, layer) -> None:
        process(self, layer)
        layer.weight_scale_inv.data = torch.exp2(layer.weight_scale_inv.log2().ceil())

    with mock.patch.object(kernel, "process_weights_after_loading", to_powers_of_two):
        return message_of(lambda: build(path, 1, torch.bfloat16, 1 << 16, quantization="fp8"))


def test_weights_that_a_kernel_changes_are_refused(tmp_path: Path) -> None:
    (message,) = run_ranks(refused_body, 1, save(tmp_path), timeout_s=300)
    assert "cannot be written in place: weight_scale_inv has other values" in message
    assert "VLLM_USE_DEEP_GEMM_E8M0=0" in message
