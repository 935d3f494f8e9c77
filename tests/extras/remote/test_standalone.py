"""The reshard without our trainer: plain FSDP2, plain vLLM, its public interface."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from tests.forked import run_forked
from tests.ranks import run_ranks
from tests.sync.vllm_engines import build_llm, unequal
from tests.tiny_models import save_tiny

pytestmark = pytest.mark.multirank
pytest.importorskip("vllm", reason="the rollout engine; `make setup` installs it")


def plain_model(path: str, lora: bool = False):
    from peft import LoraConfig, get_peft_model
    from torch.distributed.fsdp import fully_shard
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    layers = list(model.model.layers)
    if lora:
        model = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear"))
    for layer in layers:
        fully_shard(layer)
    return fully_shard(model)


def wrong_tensors(engine_model: torch.nn.Module, checkpoint: dict) -> list[str]:
    """Which weights differ from what vLLM's loader makes of `checkpoint`."""
    weights = {name: parameter.data for name, parameter in engine_model.named_parameters()}
    cast = [(name, tensor.to(torch.bfloat16)) for name, tensor in checkpoint.items()]
    return unequal(weights, lambda: engine_model.load_weights(iter(cast)))


def merged_parameters(adapted: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Full parameters of a model that PEFT wraps, by their names in the base model."""
    full = {name: p.full_tensor().double() for name, p in adapted.named_parameters()}
    merged = {}
    for name, p in full.items():
        if "lora_" in name:
            continue
        a, b = (name.replace("base_layer", f"lora_{x}.default") for x in "AB")
        plain = name.removeprefix("base_model.model.").replace(".base_layer", "")
        merged[plain] = (p + 2.0 * full[b] @ full[a] if a in full and a != name else p).float()
    return merged


def standalone_body(rank: int, world_size: int, path: str) -> dict:
    from vllm import SamplingParams

    from hybridengine.integrations.vllm import connect, reshard
    from hybridengine.remote.vllm_transfer import transfer as plugin
    from hybridengine.sync.layout import LayoutError
    from hybridengine.sync.weight_target import ReshardError, StaleWeightsError

    llm = build_llm(path, tensor_parallel_size=2, max_model_len=64, kv_cache_memory_bytes=64 << 20)
    engine_model = llm.llm_engine.model_executor.driver_worker.worker.model_runner.get_model()
    model = plain_model(path)

    def generate() -> list[list[int]]:
        sampling = SamplingParams(temperature=0, max_tokens=6, detokenize=False)
        prompts = [{"prompt_token_ids": [5, 9, 33, 2]}, {"prompt_token_ids": [7] * 20}]
        outputs = llm.generate(prompts, sampling, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    # vLLM's own interface
    with pytest.raises(RuntimeError, match="init_weight_transfer_engine"):
        llm.start_weight_update()
    info = {"model": model, "llm": llm, "bucket_bytes": 1 << 14}
    llm.init_weight_transfer_engine({"init_info": info})
    wrong = []
    for version in ("1", "2"):
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(-1.3)
        llm.start_weight_update()
        llm.update_weights({"update_info": {"verify": True}})
        llm.finish_weight_update(version)
        wrong += wrong_tensors(
            engine_model, {n: p.full_tensor() for n, p in model.named_parameters()}
        )
    assert llm.get_weight_version() == "2"
    before = generate()

    # the function, with a model that PEFT wraps
    adapted = plain_model(path, lora=True)
    with torch.no_grad():
        for p in adapted.parameters():
            p.add_(0.05 * p.requires_grad)
    adapted(torch.tensor([[1, 2, 3]]))  # leaves the root's parameters unsharded
    reports = [reshard(adapted, llm) for _ in range(2)]
    after = generate()
    wrong += wrong_tensors(engine_model, merged_parameters(adapted))

    # a sync that breaks off
    resharder = connect(model, llm)
    cache = patch.object(resharder.engine, "finish_update", side_effect=RuntimeError("cache"))
    with cache, pytest.raises(ReshardError, match="cache"):
        resharder.sync()
    with pytest.raises(StaleWeightsError, match="did not finish"):
        generate()
    resharder.sync()
    again = generate()
    delattr(engine_model, plugin.POST_LOAD)
    with pytest.raises(LayoutError, match="weight_transfer_config"):
        connect(model, llm)
    return {
        "wrong": wrong,
        "tokens": (before, after, again),
        "sent": [r.bytes_sent for r in reports],
        "versions": [r.version for r in reports],
    }


@pytest.mark.exhaustive
def test_plain_model_and_plain_vllm(tmp_path: Path) -> None:
    path = save_tiny("qwen2", tmp_path)
    for result in run_ranks(standalone_body, 2, path, timeout_s=400):
        assert result["wrong"] == []
        before, after, again = result["tokens"]
        assert before == again != after
        assert result["versions"] == [3, 4]
        assert result["sent"][0] > result["sent"][1]  # the base is frozen


@pytest.mark.parametrize("starts", ["forks", pytest.param("anew", marks=pytest.mark.exhaustive)])
def test_the_example_runs_and_its_log_probs_agree(tmp_path: Path, starts: str) -> None:
    """Two engines of one rank each."""
    root = Path(__file__).parents[3]
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    example = root / "examples" / "reshard_standalone.py"
    path = save_tiny("llama", tmp_path)
    if starts == "forks":
        module = ["--no-python", sys.executable, "-m", "examples.reshard_standalone"]
        run = run_forked([sys.executable, *command, *module, path], uses_vllm=True, timeout=400)
    else:
        run = subprocess.run(
            [sys.executable, *command, str(example), path],
            capture_output=True,
            text=True,
            timeout=400,
            cwd=root,
        )
    assert run.returncode == 0, run.stdout + run.stderr
    steps = re.findall(r"step (\d+): .* weights (\d+) .* at most ([\d.e-]+)", run.stdout)
    assert [(int(s), int(v)) for s, v, _ in steps] == [(0, 1), (1, 2), (2, 3)]
    assert max(float(gap) for *_, gap in steps) < 1e-4  # float32 on both sides
