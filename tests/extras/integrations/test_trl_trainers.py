"""TRL's own trainers and vLLM sync with ours in place (skipped where TRL is not installed)."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hybridengine.integrations import trl as adapter
from tests.extras.integrations.trainer_arguments import TWO_STEPS
from tests.ranks import run_ranks
from tests.tiny_models import VOCAB, save_tiny

pytest.importorskip("trl", reason="pip install --no-deps trl==1.16.0")


@pytest.fixture
def model(tmp_path_factory) -> str:
    return save_tiny("llama", tmp_path_factory.mktemp("trl") / "model")


def rows_of_ids(count: int) -> list[dict[str, list[int]]]:
    return [
        {
            "input_ids": [(7 * i + j) % (VOCAB - 3) + 3 for j in range(6 + i)],
            "labels": [-100] * 3 + [(7 * i + j) % (VOCAB - 3) + 3 for j in range(3, 6 + i)],
        }
        for i in range(count)
    ]


def sft_logs(model: str, folder: str) -> list[dict[str, float]]:
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    arguments = SFTConfig(
        output_dir=folder,
        **TWO_STEPS,
        bf16=False,
        per_device_train_batch_size=2,
        gradient_checkpointing=False,
        max_length=None,
        shuffle_dataset=False,
    )
    trainer = SFTTrainer(
        AutoModelForCausalLM.from_pretrained(model, dtype="float32"),
        arguments,
        train_dataset=Dataset.from_list(rows_of_ids(8)),
        processing_class=AutoTokenizer.from_pretrained(model),
    )
    trainer.train()
    names = ("loss", "grad_norm", "entropy", "mean_token_accuracy")
    return [{n: log[n] for n in names} for log in trainer.state.log_history if "loss" in log]


@pytest.mark.slow
def test_sft_trainer_has_the_same_losses(model, tmp_path):
    expected = sft_logs(model, str(tmp_path))
    with adapter.patched("log_probs", "head"):
        got = sft_logs(model, str(tmp_path))
    assert len(got) == len(expected) == 2
    for ours, theirs in zip(got, expected, strict=True):
        for name, value in theirs.items():
            assert ours[name] == pytest.approx(value, rel=1e-4, abs=1e-5), name


def test_trainers_get_our_head_and_then_theirs_again():
    from trl.trainer import sft_trainer, utils

    theirs = utils.add_fused_lm_head
    with adapter.patched("log_probs", "head"):
        assert sft_trainer.add_fused_lm_head is adapter.add_fused_lm_head
        assert utils._ChunkedLogProbFunction is adapter.ChunkedLogProbFunction
    assert sft_trainer.add_fused_lm_head is utils.add_fused_lm_head is theirs


def trained(path: str, sharded: bool) -> torch.nn.Module:
    """The model of the engine with other weights, on FSDP2 shards or replicated."""
    from torch.distributed.fsdp import fully_shard

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    if sharded:
        for layer in model.model.layers:
            fully_shard(layer)
        fully_shard(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(-1.1 if sharded else 0.9)
    return model


def open_generation(model: torch.nn.Module, rank: int, world_size: int, dtype: str) -> Any:
    """TRL's VLLMGeneration of `model` with an eager engine over all ranks, synced by ours."""
    from hybridengine.engine.vllm.environment import prepare_environment, unique_shared_memory

    prepare_environment()
    import functools

    from trl.generation import vllm_generation

    vllm_generation.LLM = functools.partial(
        vllm_generation.LLM, enforce_eager=True, kv_cache_memory_bytes=16 << 20, dtype=dtype
    )
    adapter.patch("sync")
    accelerator = SimpleNamespace(
        state=SimpleNamespace(deepspeed_plugin=None, fsdp_plugin=SimpleNamespace(fsdp_version=2)),
        num_processes=world_size,
        process_index=rank,
        local_process_index=rank,
        device=torch.device("cpu"),
        wait_for_everyone=torch.distributed.barrier,
    )
    with unique_shared_memory():  # vLLM's own names are the same in every run
        return vllm_generation.VLLMGeneration(
            model, accelerator, None, tensor_parallel_size=world_size, max_model_length=64
        )


def synced(rank: int, world_size: int, path: str) -> dict[str, Any]:
    """Sync through TRL's class, and compare with what vLLM's loader writes."""
    generation = open_generation(trained(path, True), rank, world_size, "bfloat16")
    generation._iter_named_params = lambda: pytest.fail("TRL's own sync ran")
    runner = generation.llm.llm_engine.model_executor.driver_worker.worker.model_runner
    weights = {n: p.data for n, p in runner.get_model().named_parameters()}
    wrong = []
    for model in (generation.model, trained(path, False)):
        generation.model = model
        generation.sync_weights()
        got = {name: weight.clone() for name, weight in weights.items()}
        for weight in weights.values():
            weight.zero_()
        full = {
            name: (p.full_tensor() if hasattr(p, "full_tensor") else p.data).bfloat16()
            for name, p in model.named_parameters()
        }
        runner.get_model().load_weights(full.items())
        wrong += [name for name, weight in weights.items() if not torch.equal(weight, got[name])]
    _, ids, log_probs, _ = generation.generate([[5, 9, 33]], None, 1)
    return {"wrong": wrong, "weights": len(got), "tokens": len(ids[0]), "scored": len(log_probs[0])}


@pytest.mark.multirank
def test_colocated_weights_arrive(model):
    """From FSDP2 shards, then from a model that every rank has in full."""
    pytest.importorskip("vllm", reason="the rollout engine; `make setup` installs it")
    for result in run_ranks(synced, 2, model, timeout_s=300):
        assert result["wrong"] == []
        assert result["weights"] > 5
        assert result["tokens"] == result["scored"] > 0


def compared(rank: int, world_size: int, path: str) -> list[str]:
    """What `parity` says of TRL's model and engine: synced, then with a tensor of older weights."""
    from hybridengine.lab.parity import attach

    model = trained(path, False)
    generation = open_generation(model, rank, world_size, "float32")
    generation.sync_weights()
    parity, prompts = attach(model, generation.llm), [list(range(5, 25))]
    reports = [str(parity.compare(prompts))]
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[3] += 0.5
    reports.append(str(parity.compare(prompts)))
    generation.sync_weights()
    return [*reports, str(parity.compare(prompts))]


@pytest.mark.multirank
def test_a_stale_tensor_of_a_colocated_engine_is_named(model):
    pytest.importorskip("vllm", reason="the rollout engine; `make setup` installs it")
    [[before, stale, after]] = run_ranks(compared, 1, model, timeout_s=300)
    assert "agree at all" in before and "agree at all" in after
    assert "model.layers.1.mlp.up_proj.weight" in stale and "older" in stale


class Generation:
    """What of TRL's VLLMGeneration decides who syncs."""

    def __init__(self, mode="colocate", fsdp_version=None, is_zero3=False, quantized=False):
        dtype = torch.uint8 if quantized else torch.float32
        weight = torch.nn.Parameter(torch.zeros(2, dtype=dtype), requires_grad=False)
        self.mode, self.enable_sleep_mode = mode, False
        self.model = torch.nn.ParameterList([weight])
        self._dist = SimpleNamespace(fsdp_version=fsdp_version, is_zero3=is_zero3)


@pytest.mark.parametrize("settings", [{"fsdp_version": 1}, {"is_zero3": True}, {"quantized": True}])
def test_what_cannot_be_resharded_stays_with_trl(settings):
    from hybridengine.integrations.trl.sync import init_vllm, sync_weights

    generation, calls = Generation(**settings), []
    init_vllm(generation, lambda self: calls.append("init"))
    sync_weights(generation, lambda self: calls.append("sync"))
    assert calls == ["init", "sync"]


def test_a_model_without_a_plan_is_reported_once(monkeypatch, caplog):
    from hybridengine.integrations import vllm
    from hybridengine.integrations.trl.sync import RESHARDS, sync_weights
    from hybridengine.sync.layout import LayoutError

    def refuse(model, llm):
        raise LayoutError("the engine is smaller")

    monkeypatch.setattr(vllm, "reshard", refuse)
    generation, calls = Generation(), []
    generation.llm = None
    setattr(generation, RESHARDS, True)
    for _ in range(2):
        sync_weights(generation, lambda self: calls.append("sync"))
    assert calls == ["sync", "sync"]
    assert caplog.text.count("cannot be resharded: the engine is smaller") == 1
