"""FSDP2 ranks against one plain process: loading, logits, gradients, a step, export."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.model.cases import (
    COLUMNS,
    LOGITS,
    SIZES,
    assert_close_by_scale,
    backward,
    full_tensors,
    load,
    loss_of,
    one_by_one,
    pairs_of_rank,
    rollouts,
    single_process_model,
)
from tests.ranks import run_ranks
from tests.tensors import whole
from tests.tiny_models import save_tiny

pytestmark = pytest.mark.multirank

LR, MAX_NORM = 1e-2, 0.5
EPS = 1e-2  # well above the gradients: else Adam's first step is their sign, which rounding flips


def step_body(rank: int, world_size: int, path: str) -> dict:
    from torch.distributed.tensor import Shard

    from hybridengine.model import Optimizer, parameter_shards

    model, reference, pairs = load(path, world_size), single_process_model(path), rollouts(SIZES)
    for name, parameter in model.named_parameters():
        assert parameter.dtype == torch.float32
        shards = (Shard(int(name.endswith(COLUMNS))),) if world_size > 1 else None
        assert getattr(parameter, "placements", None) == shards, name
    for name, buffer in reference.named_buffers():
        assert torch.equal(model.get_buffer(name), buffer), name
    assert all(torch.equal(w, reference.get_parameter(n)) for n, w in full_tensors(model).items())
    tied = [m.lm_head.weight is m.model.embed_tokens.weight for m in (model, reference)]
    assert tied[0] == tied[1]

    logits = backward(model, pairs_of_rank(pairs, rank, world_size), world_size)
    expected, _ = one_by_one(reference, pairs_of_rank(pairs, rank, world_size))
    torch.testing.assert_close(logits, expected, **LOGITS)
    loss_of(*one_by_one(reference, pairs)).backward()
    assert_close_by_scale(
        full_tensors(model, lambda p: p.grad), {n: p.grad for n, p in reference.named_parameters()}
    )

    optimizer = Optimizer(model, lr=LR, eps=EPS, weight_decay=0.1, total_steps=5)
    norm = optimizer.step(MAX_NORM)
    expected_norm = torch.nn.utils.clip_grad_norm_(reference.parameters(), MAX_NORM)
    assert norm.dtype == torch.float32 and norm.shape == ()
    torch.testing.assert_close(norm, expected_norm, rtol=1e-5, atol=0)
    torch.optim.AdamW(reference.parameters(), lr=LR, eps=EPS, weight_decay=0.1).step()
    for name, weight in full_tensors(model).items():
        target = reference.get_parameter(name)
        torch.testing.assert_close(weight, target, rtol=1e-5, atol=1e-6, msg=name)
    assert optimizer.last_lr == LR and all(p.grad is None for p in model.parameters())
    shards = parameter_shards(model)
    return {"names": sorted(shards), "norm": norm.item()}


@pytest.mark.parametrize(
    ("kind", "world_size"),
    [("llama", 1), ("llama", 2), ("llama", 4), ("qwen2", 2), ("qwen3", 2), ("gemma2", 4)],
)
def test_ranks_equal_one_process(tmp_path: Path, kind: str, world_size: int) -> None:
    from safetensors import safe_open

    from hybridengine.model.parameters import checkpoint_layout_from_config
    from hybridengine.model.validation import check_model

    path = save_tiny(kind, tmp_path)
    results = run_ranks(step_body, world_size, path)
    with safe_open(f"{path}/model.safetensors", "pt") as stored:
        shapes = {name: tuple(stored.get_slice(name).get_shape()) for name in stored.keys()}  # noqa: SIM118
    assert checkpoint_layout_from_config(check_model(path)).tensors == shapes
    for result in results:
        assert result["names"] == sorted(shapes)
        assert result["norm"] == results[0]["norm"]


def export_body(rank: int, world_size: int, path: str, out: str) -> dict:
    from transformers import AutoTokenizer

    from hybridengine.model import parameter_shards
    from hybridengine.run.errors import ModelError
    from hybridengine.train.checkpoint.pretrained import save_pretrained

    model = load(path, world_size, torch.bfloat16, enable_gradient_checkpointing=True)
    computed = []
    hook = model.model.norm.register_forward_hook(lambda m, i, out: computed.append(out.dtype))
    logits = backward(model, rollouts(SIZES), world_size)
    hook.remove()
    assert computed == [torch.bfloat16] and logits.dtype == torch.float32
    for parameter in model.parameters():
        assert parameter.grad.dtype == torch.float32
        parameter.data.mul_(1.37)  # full float32 mantissas, so that the cast rounds
    tokenizer = AutoTokenizer.from_pretrained(path)
    with torch.no_grad():  # leaves FSDP2's root unsharded, which the export has to undo
        model(input_ids=torch.tensor([[5, 6, 7]]), use_cache=False)
    for _ in range(2):  # the second replaces the first
        save_pretrained(model, tokenizer, out, torch.bfloat16)
    with pytest.raises(ModelError, match=r"failed on rank 0.*is not writable"):
        save_pretrained(model, tokenizer, f"{path}/config.json/below", torch.bfloat16)
    return {n: whole(p) for n, p in parameter_shards(model).items()}


@pytest.mark.parametrize(("kind", "world_size"), [("llama", 2), ("qwen2", 4)])
def test_export_is_what_transformers_loads(tmp_path: Path, kind: str, world_size: int) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    path = save_tiny(kind, tmp_path / "start")
    out = tmp_path / "out"
    masters = run_ranks(export_body, world_size, path, str(out))[0]
    model, report = AutoModelForCausalLM.from_pretrained(
        out, dtype="auto", output_loading_info=True
    )
    assert not report["missing_keys"] and not report["unexpected_keys"]
    assert model.dtype == torch.bfloat16
    assert model.generation_config.eos_token_id == 2
    loaded = dict(model.named_parameters())
    assert loaded.keys() == masters.keys()
    for name, master in masters.items():
        assert torch.equal(loaded[name], master.to(torch.bfloat16)), name
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == (kind == "llama")
    assert (
        AutoConfig.from_pretrained(out).architectures
        == AutoConfig.from_pretrained(path).architectures
    )
    decoded = [AutoTokenizer.from_pretrained(folder).decode([5, 6]) for folder in (path, out)]
    assert decoded[0] == decoded[1] and "w5" in decoded[0]
    assert [f.name for f in tmp_path.iterdir() if f.name.startswith(".")] == []


def checkpointing_body(rank: int, world_size: int, path: str) -> None:
    results = []
    for checkpointing in (False, True):
        model = load(path, world_size, torch.bfloat16, enable_gradient_checkpointing=checkpointing)
        recomputed = []
        model.model.layers[0].self_attn.register_forward_hook(lambda *_, r=recomputed: r.append(1))
        logits = backward(model, pairs_of_rank(rollouts(SIZES), rank, world_size), world_size)
        assert len(recomputed) == (2 if checkpointing else 1)
        results.append((logits, full_tensors(model, lambda p: p.grad)))
    (logits, grads), (logits_again, grads_again) = results
    assert torch.equal(logits, logits_again)
    for name in grads:
        assert torch.equal(grads[name], grads_again[name]), name


def test_checkpointing_recomputes_and_changes_no_bit(tmp_path: Path) -> None:
    run_ranks(checkpointing_body, 2, save_tiny("qwen2", tmp_path))


def broken_body(rank: int, world_size: int, *paths: str) -> list[str]:
    from hybridengine.run.errors import ModelError

    messages = []
    for path in paths:
        with pytest.raises(ModelError) as caught:
            load(path, world_size)
        messages.append(str(caught.value))
    return messages


def test_errors_of_rank_0_are_raised_on_every_rank(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    garbled, incomplete = tmp_path / "garbled", tmp_path / "incomplete"
    for folder in (garbled, incomplete):
        save_tiny("llama", folder)
    (garbled / "model.safetensors").write_bytes(b"not a checkpoint")
    weights = load_file(incomplete / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, incomplete / "model.safetensors", metadata={"format": "pt"})
    for unreadable, missing in run_ranks(broken_body, 2, str(garbled), str(incomplete)):
        assert f"loading model '{garbled}' failed on rank 0" in unreadable
        assert "lacks 1 weights of LlamaForCausalLM, such as 'model.layers.1.mlp" in missing


def norm_body(rank: int, world_size: int) -> list[float]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    from hybridengine.model.optim import by_placement, clip_factor, gradient_norm

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "shard"))
    norms = []
    for scale in (1.0, float("inf")):
        parameters = []
        for i, dim in enumerate((0, 1, 0)):
            full = torch.arange(15.0 if i == 2 else 16.0).reshape(-1, 1 if i == 2 else 4)
            placements = (Replicate(), Shard(dim))
            parameter = torch.nn.Parameter(
                distribute_tensor(torch.zeros_like(full), mesh, placements)
            )
            parameter.grad = distribute_tensor(full * scale, mesh, placements)
            parameters.append(parameter)
        plain_parameter = torch.nn.Parameter(torch.zeros(3))
        plain_parameter.grad = torch.full((3,), 2.0)
        parameters.append(plain_parameter)
        norm = gradient_norm(by_placement(parameters))
        factor = clip_factor(norm, 1.0)
        assert plain_parameter.grad[0] == 2.0  # not written
        norms += [norm.item(), factor.item()]
    return norms


def test_norm_counts_every_element_once_and_an_infinite_one_clips_nothing() -> None:
    squares = 2 * sum(i * i for i in range(16)) + sum(i * i for i in range(15)) + 12
    for norms in run_ranks(norm_body, 4):
        assert norms[0] == pytest.approx(squares**0.5, rel=1e-6)
        assert norms[1] == pytest.approx(squares**-0.5, rel=1e-5)
        assert not norms[2] < float("inf") and norms[3] == 1.0
