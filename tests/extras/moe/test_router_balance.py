"""Balance of experts: losses against their formulas in float64, biases, metrics."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hybridengine.compile import compile_layers
from hybridengine.model import PackedBatch, pack_rollouts, packed_log_probs
from hybridengine.moe.experts import EXPERTS
from hybridengine.moe.router_balance import (
    BIASES,
    RouterBalance,
    balance_routers,
    prepare_routers,
)
from hybridengine.moe.router_replay import RouterReplay
from hybridengine.moe.routers import find_routers
from hybridengine.run.errors import ModelError
from tests.extras.hybrid.hybrid_models import hybrid_config
from tests.extras.moe.moe_models import ARCHITECTURES, NUM_EXPERTS, TOP_K, tiny_moe
from tests.model.cases import load
from tests.ranks import run_ranks
from tests.tensors import whole
from tests.tiny_models import save_tiny

KINDS = (
    *("qwen3_moe", "mixtral", "deepseek_v3", "gpt_oss", "granitemoe"),
    *("qwen3_5_moe_text", "lfm2_moe", "granitemoehybrid", "nemotron_h", "kimi_linear"),
)
SIGMOIDS = ("deepseek_v3", "lfm2_moe", "nemotron_h", "kimi_linear")
RECURRENT = ("qwen3_5_moe_text", "granitemoehybrid", "nemotron_h", "kimi_linear")
BIASED = (
    *("deepseek_v3", "glm4_moe", "minimax_m2", "ernie4_5_moe"),
    *("lfm2_moe", "nemotron_h", "kimi_linear"),
)
AUX, Z = 3.0, 0.7
LENGTH = 24


def moe(kind: str) -> Any:
    return tiny_moe(kind, **ARCHITECTURES[kind])


def batch_of(ids: torch.Tensor) -> PackedBatch:
    return pack_rollouts([(ids[0, :4].tolist(), ids[0, 4:].tolist())])


def gradients(model: Any) -> dict[str, torch.Tensor]:
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def task_loss(model: Any, ids: torch.Tensor) -> torch.Tensor:
    return model(input_ids=ids, use_cache=False).logits.logsumexp(-1).sum()


def balanced_step(model: Any, balance: RouterBalance, parts: list[torch.Tensor]) -> Any:
    """(gradients, metrics) of a step whose micro-batches are `parts`."""
    model.zero_grad()
    batches = [batch_of(ids) for ids in parts]
    balance.begin_step(batches)
    for ids, batch in zip(parts, batches, strict=True):
        with balance.forward(batch):
            loss = task_loss(model, ids)
        loss.backward()
    return gradients(model), {n: float(x) for n, x in balance.end_step().items()}


def reference_step(model: Any, ids: torch.Tensor, sigmoid: bool) -> Any:
    """The same of one micro-batch, by the formulas and autograd in float64."""
    model.zero_grad()
    seen, handles = [], []
    for router in find_routers(model):
        hook = partial(lambda at, m, a, out: seen.append([out[i] for i in at]), router.outputs)
        handles.append(router.module.register_forward_hook(hook))
    loss = task_loss(model, ids)
    (aux, z), violations, counts = torch.zeros(2, dtype=torch.float64), [], []
    for logits, _, indices in seen:
        logits = logits.double()
        scores = logits.sigmoid() if sigmoid else logits.softmax(1)
        count = nn.functional.one_hot(indices, NUM_EXPERTS).double().sum((0, 1))
        share = (scores / scores.sum(1, keepdim=True)).mean(0)
        aux = aux + NUM_EXPERTS * (count / len(logits) * share).sum() / len(seen)
        z = z + logits.logsumexp(1).square().mean() / len(seen)
        violations.append(float(count.max() / count.mean() - 1))
        counts.append(count)
    (loss + AUX * aux + Z * z).backward()
    for handle in handles:
        handle.remove()
    return gradients(model), {
        "moe/load_max_violation/mean": sum(violations) / len(violations),
        "moe/load_max_violation/max": max(violations),
        "moe/dead_experts": float((torch.stack(counts) == 0).double().mean()),
        "moe/aux_loss": aux.item(),
        "moe/z_loss": z.item(),
    }


def assert_close(got: Any, expected: Any, rtol: float = 1e-5) -> None:
    assert got.keys() == expected.keys()
    for name, grad in expected.items():
        limit = rtol * float(grad.abs().max())
        torch.testing.assert_close(got[name], grad, rtol=0, atol=limit, msg=name)


@pytest.mark.parametrize("kind", KINDS)
def test_losses_and_metrics_equal_their_formulas(kind: str) -> None:
    """In float64, but for routers and recurrences that compute in float32 themselves."""
    model, ids = moe(kind).double(), torch.randint(3, 100, (1, LENGTH))
    model.set_experts_implementation("eager")  # the others have no float64
    expected = reference_step(model, ids, sigmoid=kind in SIGMOIDS)
    plain = reference_step(model, ids, sigmoid=False)[0] if kind == "deepseek_v3" else None
    got = balanced_step(model, RouterBalance(model, AUX, Z), [ids])
    assert_close(got[0], expected[0], rtol=1e-4 if kind in RECURRENT else 1e-5)
    assert got[1] == pytest.approx(expected[1], rel=1e-6)
    if plain is not None:
        name = next(n for n in plain if n.endswith("gate.weight"))
        assert not torch.allclose(got[0][name], plain[name], rtol=1e-2), "scores matter"


@pytest.mark.parametrize(
    "kind", ("mixtral", "minimax", "qwen3_next", "qwen3_5_moe_text", "granitemoehybrid")
)
def test_one_layer_equals_transformers(kind: str) -> None:
    """Its loss pools the layers, so that with one layer both are the same."""
    options = ARCHITECTURES[kind] | {"num_hidden_layers": 1}
    if "layer_types" in options:
        options["layer_types"] = options["layer_types"][:1]
    model, ids = tiny_moe(kind, **options), torch.randint(3, 100, (1, LENGTH))
    out = model(input_ids=ids, use_cache=False, output_router_logits=True)
    (out.logits.logsumexp(-1).sum() + AUX * out.aux_loss).backward()
    expected = gradients(model)
    got, metrics = balanced_step(model, RouterBalance(model, AUX), [ids])
    assert_close(got, expected)
    assert metrics["moe/aux_loss"] == pytest.approx(out.aux_loss.item(), rel=1e-5)


def test_recomputed_layers_count_once() -> None:
    model, ids = moe("qwen3_moe"), torch.randint(3, 100, (1, LENGTH))
    balance = RouterBalance(model, AUX, Z)
    expected = balanced_step(model, balance, [ids])
    model.train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    got = balanced_step(model, balance, [ids])
    assert got[1] == expected[1]
    assert all(torch.equal(got[0][name], grad) for name, grad in expected[0].items())


def test_micro_batches_share_counts() -> None:
    """Metrics and z-loss do not depend on the split; f_e is of the micro-batches up to now."""
    model, ids = moe("qwen3_moe"), torch.randint(3, 100, (1, LENGTH))
    balance = RouterBalance(model, AUX, Z)
    twice, once = (balanced_step(model, balance, [ids] * n)[1] for n in (2, 1))
    assert twice == pytest.approx(once)
    parts = [torch.randint(3, 100, (1, n)) for n in (9, 30)]
    balance = RouterBalance(model, 0.0, Z)
    results = [balanced_step(model, balance, given) for given in (parts, parts[::-1])]
    assert_close(results[0][0], results[1][0])
    assert results[0][1] == pytest.approx(results[1][1])


def test_a_dummy_and_passes_outside_of_a_step_count_for_nothing() -> None:
    model, ids = moe("qwen3_moe"), torch.randint(3, 100, (1, LENGTH))
    task_loss(model, ids).backward()
    plain = gradients(model)
    balance = RouterBalance(model, AUX, Z)
    model.zero_grad()
    task_loss(model, ids).backward()
    assert all(torch.equal(grad, plain[name]) for name, grad in gradients(model).items())
    model.zero_grad()
    balance.begin_step([batch_of(ids).as_dummy()])
    with balance.forward(batch_of(ids).as_dummy()):
        loss = task_loss(model, ids)
    loss.backward()
    assert balance.end_step()["moe/dead_experts"] == 1
    assert all(torch.equal(grad, plain[name]) for name, grad in gradients(model).items())


def test_the_load_is_that_of_replayed_routes() -> None:
    model, ids = moe("mixtral"), torch.randint(3, 100, (1, LENGTH))
    replay, balance = RouterReplay(model), RouterBalance(model)
    routes = torch.zeros(LENGTH, 2, TOP_K, dtype=torch.int16)
    routes[..., 1] = 1  # every token to the first two experts
    with replay.replay(routes):
        _, metrics = balanced_step(model, balance, [ids])
    assert metrics["moe/load_max_violation/max"] == NUM_EXPERTS / TOP_K - 1
    assert metrics["moe/dead_experts"] == 1 - TOP_K / NUM_EXPERTS
    assert "moe/aux_loss" not in metrics, "not computed where it is no loss"


def test_compiled_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    ids = torch.randint(3, 100, (1, LENGTH))
    results = []
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    for compiles in (False, True):
        model = moe("qwen3_moe")
        model.set_experts_implementation(EXPERTS)
        if compiles:
            torch._dynamo.reset()
            torch._dynamo.utils.counters.clear()
            compile_layers(model.model.layers)
        results.append(balanced_step(model, RouterBalance(model, AUX, Z), [ids]))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1, "of both layers"
    assert_close(results[1][0], results[0][0])
    assert results[1][1] == pytest.approx(results[0][1])


@pytest.mark.parametrize("kind", BIASED)
def test_the_bias_moves_against_the_load(kind: str) -> None:
    model, ids = moe(kind), torch.randint(3, 100, (1, LENGTH))
    prepare_routers(model, updates_bias=True)
    balance = RouterBalance(model, bias_update_rate=0.25)
    before = {n: b.clone() for n, b in model.named_buffers() if n.endswith(BIASES)}
    assert len(before) == len(find_routers(model)) and before.keys() <= model.state_dict().keys()
    chosen: list[torch.Tensor] = []
    for router in find_routers(model):
        router.module.register_forward_hook(lambda m, a, out: chosen.append(out[2]))
    balanced_step(model, balance, [ids])
    after = dict(model.named_buffers())
    for (name, old), indices in zip(before.items(), chosen, strict=True):
        load = torch.bincount(indices.flatten(), minlength=NUM_EXPERTS).double()
        expected = 0.25 * (load.mean() - load).sign()
        torch.testing.assert_close((after[name] - old).flatten().double(), expected)
        assert expected.any()
    balance.begin_step([batch_of(ids)])
    with balance.forward(batch_of(ids)):
        task_loss(model, ids).backward()
    kept = {name: after[name].clone() for name in before}
    balance.end_step(updated=False)
    assert all(torch.equal(dict(model.named_buffers())[n], b) for n, b in kept.items())


def violations_of_training(kind: str, steps: int, **options: float) -> list[float]:
    """Largest violation per step of a router that starts with all tokens at the same experts."""
    model = moe(kind)
    with torch.no_grad():
        for router in find_routers(model):
            owner = router.module
            bias = owner.bias if kind == "gpt_oss" else owner.e_score_correction_bias
            bias[:TOP_K] += 4.0 if kind == "gpt_oss" else 1.5
    balance = RouterBalance(model, **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    generator, found = torch.Generator().manual_seed(5), []
    for _ in range(steps):
        ids = torch.randint(3, 100, (1, 64), generator=generator)
        batch = batch_of(ids)
        balance.begin_step([batch])
        with balance.forward(batch):
            logits = model(input_ids=ids, use_cache=False).logits
        nn.functional.cross_entropy(logits[0, :-1], ids[0, 1:]).backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(float(balance.end_step()["moe/load_max_violation/max"]))
    return found


@pytest.mark.parametrize(
    ("kind", "options"),
    [("gpt_oss", {"aux_loss_coef": 1.0}), ("glm4_moe", {"bias_update_rate": 0.05})],
)
def test_training_balances_the_load(kind: str, options: dict[str, float]) -> None:
    balanced = violations_of_training(kind, 40, **options)
    left = violations_of_training(kind, 40)
    assert balanced[0] == left[0] > 2, "tokens begin at the same experts"
    assert sum(balanced[-5:]) < 0.6 * sum(left[-5:])
    assert sum(balanced[-5:]) / 5 < 0.5 * balanced[0]


def ranks_body(rank: int, world_size: int, path: str, sp_size: int) -> list[Any]:
    """(gradients, metrics) under FSDP2, with and without shared prefixes."""
    import torch.distributed as dist

    model = load(path, world_size, enable_gradient_checkpointing=True)
    balance = RouterBalance(model, AUX, Z)
    group = dist.group.WORLD if sp_size > 1 else None
    pairs = cases() if sp_size > 1 else cases()[rank::world_size]
    results = []
    for shared in (False, True):
        batch = pack_rollouts(pairs, "cpu", group, shared_prefix=shared)
        model.zero_grad()
        balance.begin_step([batch], float(world_size))
        log_probs, _ = packed_log_probs(model, batch)
        (log_probs.sum() * world_size).backward()  # FSDP2 averages over the ranks
        grads = {n: whole(p.grad) for n, p in model.named_parameters()}
        results.append((grads, {n: float(x) for n, x in balance.end_step().items()}))
    return results


def cases() -> list[tuple[list[int], list[int]]]:
    prompts = [[5, 9, 33, 7], [8, 20, 11]]
    return [(prompts[k % 2], [40 + k, 50, 60 + k, 8][: 1 + k]) for k in range(4)]


@pytest.mark.multirank
@pytest.mark.parametrize(
    ("kind", "world_size", "sp_size"),
    [("qwen3_moe", 2, 1), ("qwen3_moe", 2, 2), ("qwen3_5_moe_text", 2, 2)],
)
def test_ranks_do_not_matter(tmp_path: Path, kind: str, world_size: int, sp_size: int) -> None:
    """One rank against two, which have different tokens or halves of each sequence.

    Without sequence parallelism rank 0 and rank 1 have the sequences of one prompt each.
    """
    path = save_tiny(kind if kind == "qwen3_moe" else hybrid_config(kind), tmp_path)
    expected = run_ranks(ranks_body, 1, path, 1)[0]
    assert expected[0][1] != expected[1][1], "a shared token counts once"
    for results in run_ranks(ranks_body, world_size, path, sp_size):
        for (grads, metrics), (wanted, numbers) in zip(results, expected, strict=True):
            assert metrics == pytest.approx(numbers, rel=1e-5)
            assert_close(grads, wanted, rtol=1e-4)


class WithoutLogits(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(NUM_EXPERTS, 4))

    def forward(self, hidden: torch.Tensor) -> Any:
        return (hidden @ self.weight.T).softmax(1).topk(TOP_K)


def test_what_is_not_supported_is_refused_by_name() -> None:
    llama, mixtral = tiny_moe("llama"), moe("mixtral")
    assert balance_routers(llama, 0.0, 0.0, 0.0) is None
    with pytest.raises(ModelError, match=r"router_aux_loss_coef.* needs a mixture.*LlamaForCausal"):
        balance_routers(llama, 0.01, 0.0, 0.0)
    for options in ({"freeze": True}, {"updates_bias": True}):
        with pytest.raises(ModelError, match="LlamaForCausalLM has no module `experts`"):
            prepare_routers(llama, **options)
    for build in (
        lambda: prepare_routers(mixtral, updates_bias=True),
        lambda: balance_routers(mixtral, 0.0, 0.0, 0.1),
    ):
        with pytest.raises(ModelError, match="e_score_correction_bias, and those of Mixtral"):
            build()
    block = nn.ModuleDict({"gate": WithoutLogits(), "experts": nn.Linear(1, 1)})
    model = nn.ModuleDict({"layers": nn.ModuleList([nn.ModuleDict({"mlp": block})])})
    with pytest.raises(ModelError, match=r"router WithoutLogits of .* is not the logits"):
        RouterBalance(model)


def test_frozen_routers_have_no_gradient() -> None:
    model, ids = moe("gpt_oss"), torch.randint(3, 100, (1, LENGTH))
    prepare_routers(model, freeze=True)
    task_loss(model, ids).backward()
    frozen = {n for n, p in model.named_parameters() if not p.requires_grad}
    assert frozen == {n for n, _ in model.named_parameters() if ".router." in n} != set()
    assert not frozen & gradients(model).keys()
