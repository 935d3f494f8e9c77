"""Experts divided over ranks: logits, gradients and updates are those without, on 2 x 2 ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from hybridengine.moe.experts import EXPERTS
from hybridengine.run.errors import ModelError
from tests.extras.moe.moe_models import ARCHITECTURES, tiny_moe
from tests.loading import load_sharded
from tests.model.cases import LOGITS
from tests.ranks import message_of, run_ranks
from tests.tensors import part, whole
from tests.tiny_models import save_tiny

LENGTHS = (24, 1, 7, 16)  # of each rank's sequence
LOAD = dict(shard_dim1=lambda name: "o_proj" in name, enable_gradient_checkpointing=True)


def load_divided(path: str, world_size: int, size: int, **options: Any) -> Any:
    from hybridengine.model import sharding_mesh

    mesh = sharding_mesh("cpu", world_size)
    return load_sharded(path, mesh=mesh, expert_parallel_size=size, **LOAD | options)


def step(model: Any, ids: torch.Tensor, max_norm: float) -> dict[str, Any]:
    """Logits, gradients and their norm; the model is then updated."""
    from hybridengine.model import Optimizer

    optimizer = Optimizer(model, lr=1e-3, total_steps=2)
    logits = model(input_ids=ids, use_cache=False).logits
    logits.logsumexp(-1).mean().backward()
    grads = {n: whole(p.grad).clone() for n, p in model.named_parameters()}
    norm = optimizer.step(max_norm)
    return {"logits": logits.detach(), "grads": grads, "norm": norm}


def compare_body(rank: int, world_size: int, path: str, sizes: tuple[int, ...]) -> list[Any]:
    """For each group size: the results of a natural and a replayed step, experts held here."""
    from hybridengine.moe.router_replay import RouterReplay

    ids = (torch.arange(LENGTHS[rank]) * 7 % 90 + 3)[None]
    results = []
    for size in sizes:
        model = load_divided(path, world_size, size, param_dtype=torch.float32)
        assert model.config._experts_implementation == EXPERTS
        steps, replay = [step(model, ids, 0.5)], RouterReplay(model)
        first_experts = torch.arange(replay.shape[1], dtype=torch.int16)
        with replay.replay(first_experts.expand(ids.shape[1], *replay.shape).clone()):
            steps.append(step(model, ids, 1e9))
        held = sum(part(p).numel() for n, p in model.named_parameters() if ".experts." in n)
        results.append((steps, held))
    return results


@pytest.mark.multirank
@pytest.mark.parametrize(
    "kind",
    [
        "deepseek_v3",
        "gpt_oss",
        pytest.param("qwen3_moe", marks=pytest.mark.exhaustive),
        pytest.param("mixtral", marks=pytest.mark.exhaustive),
    ],
)
def test_a_step_is_that_of_experts_on_every_rank(tmp_path: Path, kind: str) -> None:
    """Ranks have 1 to 24 tokens; in the replayed step the experts of most ranks have none."""
    # Whole vectors per row: torch's activations compute the last elements by another function.
    options = ARCHITECTURES[kind] | {"intermediate_size": 64}
    tiny_moe(kind, **options).save_pretrained(tmp_path)
    for plain, *divided in run_ranks(compare_body, 4, str(tmp_path), (1, 2, 4), timeout_s=400):
        for steps, held in divided:
            assert held == plain[1], "the same memory for shards"
            assert torch.equal(steps[0]["logits"], plain[0][0]["logits"]), "where a token goes"
            for got, expected in zip(steps, plain[0], strict=True):
                torch.testing.assert_close(got["logits"], expected["logits"], **LOGITS)
                torch.testing.assert_close(got["norm"], expected["norm"], rtol=1e-4, atol=0)
                assert got["grads"].keys() == expected["grads"].keys()
                for name, grad in expected["grads"].items():  # sums over tokens, in another order
                    limit = 1e-4 * float(grad.abs().max())
                    torch.testing.assert_close(got["grads"][name], grad, rtol=1e-4, atol=limit)


def gathered_body(rank: int, world_size: int, path: str) -> tuple[int, int]:
    """The largest weight of experts that a product gets, in experts, and of the other dtype."""
    from unittest import mock

    from hybridengine.moe import experts

    model = load_divided(path, world_size, 2)  # bfloat16
    sizes = []

    def note(x: torch.Tensor, weight: torch.Tensor, cu_counts: torch.Tensor) -> torch.Tensor:
        sizes.append((len(weight), weight.dtype.itemsize))
        return product(x, weight, cu_counts)

    product = experts.grouped_linear
    with mock.patch.object(experts, "grouped_linear", note):
        model(input_ids=torch.arange(3, 20)[None], use_cache=False).logits.sum().backward()
    return max(sizes)


@pytest.mark.multirank
def test_no_rank_gathers_all_experts(tmp_path: Path) -> None:
    path = save_tiny("qwen3_moe", tmp_path)
    assert run_ranks(gathered_body, 4, path) == [(2, 2)] * 4  # of 4 experts, in bfloat16


def checkpoint_body(rank: int, world_size: int, path: str, out: str) -> dict[str, bool]:
    """Train with one size, resume with others and export."""
    from transformers import AutoTokenizer

    from hybridengine.model import Optimizer, parameter_shards
    from hybridengine.train.checkpoint.pretrained import save_pretrained
    from hybridengine.train.checkpoint.tensors import TensorFiles

    def build(size: int) -> tuple[Any, Any, TensorFiles]:
        model = load_divided(path, world_size, size, param_dtype=torch.float32)
        optimizer = Optimizer(model, lr=1e-2, total_steps=4)
        return model, optimizer, TensorFiles({"actor": (model, optimizer)})

    def full(model: Any, optimizer: Any) -> dict[str, torch.Tensor]:
        tensors = parameter_shards(model) | optimizer.moments()
        return {n: getattr(x, "full_tensor", lambda x=x: x)().clone() for n, x in tensors.items()}

    model, optimizer, files = build(2)
    model(input_ids=torch.arange(3, 20)[None], use_cache=False).logits.sum().backward()
    optimizer.step(1.0)
    before = full(model, optimizer)
    files.save(Path(out)).result()
    save_pretrained(model, AutoTokenizer.from_pretrained(path), f"{out}/hf", torch.float32)
    equal = {}
    for size in (2, 4, 1):
        model, optimizer, files = build(size)
        files.load(Path(out))
        after = full(model, optimizer)
        equal[f"resumed with {size}"] = before.keys() == after.keys() and all(
            torch.equal(before[name], after[name]) for name in before
        )
    if rank == 0:
        exported = AutoModelForCausalLM.from_pretrained(f"{out}/hf").state_dict()
        equal["exported"] = all(torch.equal(x, before[name]) for name, x in exported.items())
    return equal


@pytest.mark.multirank
def test_checkpoints_resume_with_any_size_and_export(tmp_path: Path) -> None:
    path = save_tiny("qwen3_moe", tmp_path / "model")
    (tmp_path / "out").mkdir()
    for equal in run_ranks(checkpoint_body, 4, path, str(tmp_path / "out"), timeout_s=300):
        assert all(equal.values()) and len(equal) >= 3, equal


def refused_body(rank: int, world_size: int, dense: str, moe: str) -> list[str]:
    from hybridengine.model import apply_lora

    def message(*arguments: Any, **options: Any) -> str:
        call: Callable[[], Any] = lambda: load_divided(*arguments, **options)  # noqa: E731
        return message_of(call)

    def adapt(model: Any) -> None:
        apply_lora(model, 2, 4.0, [], None, ("experts.down_proj",))

    return [message(dense, 2, 2), message(moe, 2, 2, adapt=adapt)]


@pytest.mark.multirank
def test_what_is_not_divided_is_refused(tmp_path: Path) -> None:
    dense, moe = (save_tiny(kind, tmp_path / kind) for kind in ("llama", "qwen3_moe"))
    for no_experts, adapters in run_ranks(refused_body, 2, dense, moe):
        assert "LlamaForCausalLM has no experts" in no_experts
        assert "does not divide adapters of experts" in adapters


def test_a_number_of_experts_that_is_not_divisible_is_refused() -> None:
    from hybridengine.moe.expert_parallel import distribute_experts

    class Mesh:
        shape = (1, 3)

    config = AutoConfig.for_model("qwen3_moe", num_experts=8, num_hidden_layers=1)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    with pytest.raises(ModelError, match=r"expert_parallel_size=3 .* does not divide gate_up_proj"):
        distribute_experts(model, Mesh())  # type: ignore[arg-type]
