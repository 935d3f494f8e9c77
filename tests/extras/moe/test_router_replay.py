"""Router replay: recorded experts, the model's own weights of them, and gradients."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from hybridengine.moe.router_replay import RouterReplay, Routes, SequenceRoutes, route_shape
from hybridengine.moe.routers import find_routers
from hybridengine.run.errors import ModelError
from tests.extras.moe.moe_models import ARCHITECTURES, NUM_EXPERTS, TOP_K, tiny_moe
from tests.loading import load_sharded
from tests.ranks import run_ranks
from tests.tensors import whole
from tests.tiny_models import save_tiny

LENGTH = 24


@pytest.fixture(scope="module", params=list(ARCHITECTURES))
def moe(request: pytest.FixtureRequest) -> tuple[Any, RouterReplay, torch.Tensor]:
    model = tiny_moe(request.param, **ARCHITECTURES[request.param])
    return model, RouterReplay(model), torch.randint(3, 100, (1, LENGTH))


def run(model: Any, ids: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    model.zero_grad()
    logits = model(input_ids=ids, use_cache=False).logits
    logits.logsumexp(-1).sum().backward()
    return logits, {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def shifted(routes: torch.Tensor) -> torch.Tensor:
    return torch.where(routes < 0, routes, (routes + 1) % NUM_EXPERTS)


def test_own_routes_are_bit_equal_in_any_order(moe: Any) -> None:
    """Logits and all gradients are those of the natural forward."""
    model, replay, ids = moe
    logits, grads = run(model, ids)
    with replay.record(LENGTH) as recorded:
        model(input_ids=ids, use_cache=False)
    routes = recorded.routes
    assert routes.shape == (LENGTH, *replay.shape) and replay.shape == (
        model.config.num_hidden_layers,
        TOP_K,
    )
    sparse = sorted({router.layer for router in find_routers(model)})
    assert (routes[:, sparse] >= 0).all(), "every router is recorded"
    with replay.replay(routes.flip(-1)) as call:
        again, same = run(model, ids)
    assert torch.equal(again, logits) and not call.differs.any()
    assert grads.keys() == same.keys()
    assert all(torch.equal(grads[name], same[name]) for name in grads)
    assert any("gate" in n or "router" in n for n in grads), "the routers are trained"


def test_other_routes_are_taken_with_the_routers_own_weights(moe: Any) -> None:
    """What the experts get is compared, through a hook on the module that computes them."""
    model, replay, ids = moe
    seen, handles = [], []
    for router in find_routers(model):
        block = next(m for m in model.modules() if router.module in list(m.children()))

        def note(module: Any, args: Any, kwargs: Any, layer: int = router.layer) -> None:
            seen.append((layer, [*args, *kwargs.values()][1]))

        handles.append(block.experts.register_forward_pre_hook(note, with_kwargs=True))
    with replay.record(LENGTH) as recorded:
        natural = model(input_ids=ids, use_cache=False).logits
    seen.clear()
    replay.pop_counts()
    routes = shifted(recorded.routes)
    routes[3] = -1  # no record
    with replay.replay(routes):
        logits, grads = run(model, ids)
    assert len(seen) == len({router.layer for router in find_routers(model)})
    for layer, chosen in seen:
        expected = routes[:, layer].long()
        chosen = chosen.reshape(LENGTH, -1)
        has_record = expected[:, 0] >= 0
        assert torch.equal(chosen.sort(1).values[has_record], expected.sort(1).values[has_record])
        assert (chosen[3] >= 0).all(), "a token without a record routes naturally"
    assert not torch.equal(logits[0, 4:], natural[0, 4:])
    gates = [g for n, g in grads.items() if ".gate." in n or ".router." in n]
    assert gates and all(g.abs().sum() > 0 for g in gates), "gradients flow into the routers"
    counts = replay.pop_counts()
    assert (float(counts.total), float(counts.tokens)) == (LENGTH, LENGTH - 1)
    assert 0 < counts.differing_tokens <= counts.tokens
    assert counts.pairs == (LENGTH - 1) * len(seen)
    for handle in handles:
        handle.remove()
    assert torch.equal(model(input_ids=ids, use_cache=False).logits, natural), "as before"


def test_recomputed_layers_replay_in_any_order_of_the_passes() -> None:
    model = tiny_moe("qwen3_moe", **ARCHITECTURES["qwen3_moe"])
    replay = RouterReplay(model)
    inputs = [torch.randint(3, 100, (1, LENGTH)) for _ in range(2)]
    records = []
    for ids in inputs:
        with replay.record(LENGTH) as recorded:
            model(input_ids=ids, use_cache=False)
        records.append(shifted(recorded.routes))
    plain = []
    for ids, routes in zip(inputs, records, strict=True):
        with replay.replay(routes):
            plain.append(run(model, ids))
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()
    losses = []
    for ids, routes in zip(inputs, records, strict=True):
        with replay.replay(routes):
            losses.append(model(input_ids=ids, use_cache=False).logits.logsumexp(-1).sum())
    for loss, (_, expected) in zip(losses, plain, strict=True):  # after both forward passes
        model.zero_grad()
        loss.backward()
        for name, parameter in model.named_parameters():
            assert torch.equal(parameter.grad, expected[name]), name


def test_torchs_checkpoint_wrapper_replays() -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    model, wrapped = (tiny_moe("olmoe", **ARCHITECTURES["olmoe"]) for _ in range(2))
    for k, layer in enumerate(wrapped.model.layers):
        checkpoint_fn = partial(checkpoint, use_reentrant=False)
        wrapped.model.layers[k] = checkpoint_wrapper(layer, checkpoint_fn=checkpoint_fn)
    ids = torch.randint(3, 100, (1, LENGTH))
    replay = RouterReplay(model)
    with replay.record(LENGTH) as recorded:
        model(input_ids=ids, use_cache=False)
    routes = shifted(recorded.routes)
    with replay.replay(routes):
        logits, grads = run(model, ids)
    with RouterReplay(wrapped).replay(routes):
        again, same = run(wrapped, ids)
    assert torch.equal(again, logits)
    for name, grad in same.items():
        assert torch.equal(grad, grads[name.replace("_checkpoint_wrapped_module.", "")]), name


@pytest.mark.parametrize(
    ("kind", "options", "name"),
    [
        ("phimoe", {"num_local_experts": 8, "num_experts_per_tok": 2}, "PhimoeTopKRouter"),
        ("jamba", {"num_experts": 8, "use_mamba_kernels": False}, "JambaSparseMoeBlock"),
        ("llama", {}, "LlamaForCausalLM"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(kind: str, options: Any, name: str) -> None:
    model = tiny_moe(kind, **options)
    with pytest.raises(ModelError, match=name):
        RouterReplay(model)
    with pytest.raises(ModelError, match=name):
        route_shape(model.config)


def test_wrong_routes_are_refused() -> None:
    model = tiny_moe("qwen3_moe", **ARCHITECTURES["qwen3_moe"])
    replay, ids = RouterReplay(model), torch.randint(3, 100, (1, LENGTH))
    with (
        pytest.raises(ModelError, match=r"expected \[tokens, layers, .* = \[T, 2, 2\]"),
        replay.replay(torch.zeros(LENGTH, 2, 3, dtype=torch.int16)),
    ):
        pass
    routes = torch.zeros(LENGTH - 1, 2, 2, dtype=torch.int16)
    with (
        pytest.raises(ModelError, match="routes of 23 tokens for a forward pass of 24"),
        replay.replay(routes),
    ):
        model(input_ids=ids, use_cache=False)
    with pytest.raises(ModelError, match="the model was not called"), replay.replay(routes):
        pass
    model(input_ids=ids, use_cache=False)


def test_a_shared_token_takes_the_first_record() -> None:
    routes = torch.tensor([[-1], [4], [5], [1], [9], [-1]], dtype=torch.int16)[..., None]
    merged = Routes(routes).share(torch.tensor([0, 1, 2, 0, 1, 3]), 4)
    assert merged.experts.flatten().tolist() == [1, 4, 5, -1]


def ranks_body(rank: int, world_size: int, path: str, sp_size: int) -> dict[str, Any]:
    """Log-probs and gradients of a pack with shared prefixes and forced routes, under FSDP2."""
    import torch.distributed as dist

    from hybridengine.model import pack_rollouts, packed_log_probs, sharding_mesh

    model = load_sharded(
        path,
        mesh=sharding_mesh("cpu", world_size),
        param_dtype=torch.float32,
        enable_gradient_checkpointing=True,
    )
    replay = RouterReplay(model)
    pairs, routes = cases()
    parts, result = {"routes": SequenceRoutes(routes)}, {}
    for shared in (False, True):
        group = dist.group.WORLD if sp_size > 1 else None
        batch = pack_rollouts(pairs, "cpu", group, shared_prefix=shared, parts=parts)
        model.zero_grad()
        log_probs, _ = packed_log_probs(model, batch)
        (log_probs.sum() * sp_size).backward()  # FSDP2 averages over ranks, of part of the rows
        grads = {n: whole(p.grad) for n, p in model.named_parameters()}
        counts = torch.stack(list(replay.pop_counts()))
        dist.all_reduce(counts)
        result[shared] = (log_probs.detach(), grads, counts.tolist())
    return result


def cases() -> tuple[Any, list[torch.Tensor]]:
    """Return pairs of a common prompt, and routes of all their tokens but the last."""
    generator = torch.Generator().manual_seed(3)
    pairs = [([5, 9, 33, 7], [40 + k, 50, 60 + k, 8][: 2 + k]) for k in range(3)]
    experts = torch.stack([torch.randperm(4, generator=generator)[:2] for _ in range(202)])
    of_token = experts.view(101, 2, 2).short()  # the same for a token of a common prefix
    return pairs, [of_token[torch.tensor([*a, *b[:-1]])] for a, b in pairs]


@pytest.mark.multirank
@pytest.mark.parametrize("sp_size", [1, 2])
def test_under_fsdp2_packed_shared_and_recomputed(tmp_path: Path, sp_size: int) -> None:
    """Two ranks against one process that runs each sequence alone with the same routes."""
    from transformers import AutoModelForCausalLM

    path = save_tiny("qwen3_moe", tmp_path)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    replay, expected = RouterReplay(model), []
    natural = []
    for (prompt, response), routes in zip(*cases(), strict=True):
        ids = torch.tensor([[*prompt, *response]])
        padded = torch.cat([routes, routes.new_full((1, 2, 2), -1)])
        with replay.replay(padded):
            logits = model(input_ids=ids).logits[0, len(prompt) - 1 : -1]
        rows = logits.log_softmax(-1).gather(1, torch.tensor(response)[:, None])[:, 0]
        expected.append(rows)
        with torch.no_grad():
            natural.append(model(input_ids=ids).logits[0, len(prompt) - 1 : -1].log_softmax(-1))
    flat = torch.cat(expected)
    flat.sum().backward()
    wanted = {name: p.grad for name, p in model.named_parameters()}
    others = torch.cat(
        [
            x.gather(1, torch.tensor(r)[:, None])[:, 0]
            for x, (_, r) in zip(natural, cases()[0], strict=True)
        ]
    )
    assert (flat - others).abs().max() > 1e-3, "the routes matter"
    for result in run_ranks(ranks_body, 2, path, sp_size):
        for shared in (False, True):
            log_probs, grads, counts = result[shared]
            torch.testing.assert_close(log_probs, flat.detach(), rtol=1e-4, atol=1e-4)
            for name, grad in grads.items():
                scale = wanted[name].abs().max()
                torch.testing.assert_close(grad, wanted[name], rtol=0, atol=float(scale) * 1e-4)
            assert counts[1] > 0 and 0 < counts[2] <= counts[1]
