"""Router replay in verl's FSDP engine: the engine of the installed verl on two ranks.

verl's services (Ray, tensordict, …) are empty here, so a batch is a dict.
"""

from __future__ import annotations

import copy
import importlib
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.extras.integrations.verl_services import empty_services
from tests.extras.moe.moe_models import ARCHITECTURES, NUM_EXPERTS, TOP_K, tiny_moe
from tests.ranks import message_of, run_ranks

pytest.importorskip(
    "benchmarks._verl", reason="pip install --no-deps verl==0.9.1", exc_type=ImportError
)
pytestmark = pytest.mark.multirank
LENGTHS = (6, 3, 5)
LAYERS = 2
CLOSE = dict(rtol=2e-4, atol=2e-5)  # float32 in another order, after a softmax
Engine = Any


class Batch(dict[str, Any]):
    """A micro-batch: what verl's engine calls of a TensorDict."""

    batch_size = (len(LENGTHS),)

    def to(self, device: Any) -> Batch:
        return self


def batch(**fields: Any) -> Batch:
    generator = torch.Generator().manual_seed(0)
    parts = [torch.randint(3, 100, (n,), generator=generator) for n in LENGTHS]
    positions = [torch.arange(n) for n in LENGTHS]
    fields = {"enable_routing_replay": True, "temperature": 1.0} | fields
    return Batch(input_ids=jagged(parts), position_ids=jagged(positions), **fields)


def jagged(parts: list[torch.Tensor]) -> torch.Tensor:
    return torch.nested.as_nested_tensor(parts, layout=torch.jagged)


def draw_routes() -> list[torch.Tensor]:
    """Return routes as verl has them from a rollout: the row of the last token is of zeros."""
    generator = torch.Generator().manual_seed(1)
    routes = []
    for length in LENGTHS:
        scores = torch.rand(length, LAYERS, NUM_EXPERTS, generator=generator)
        routes.append(scores.topk(TOP_K).indices.short())
        routes[-1][-1] = 0
    return routes


def build(kind: str, mode: str, strategy: str, **options: Any) -> Engine:
    """Return verl's engine around a tiny model, as `_build_model_optimizer` does."""
    from verl.workers.config import EngineRouterReplayConfig, FSDPEngineConfig
    from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

    remove_padding = options.pop("use_remove_padding", True)
    model_config = SimpleNamespace(
        use_remove_padding=remove_padding,
        lora_rank=0,
        enable_activation_offload=False,
        get=lambda name, default: default,
    )
    config = FSDPEngineConfig(
        strategy=strategy,
        router_replay=EngineRouterReplayConfig(mode=mode),
        mixed_precision=dict.fromkeys(("param_dtype", "reduce_dtype", "buffer_dtype"), "fp32"),
        wrap_policy={"transformer_layer_cls_to_wrap": [f"{kind}DecoderLayer"]},
        use_torch_compile=False,
        pad_to_length_bucket=8,
        **options,
    )
    engine = FSDPEngineWithLMHead(model_config, config, None, None)
    return engine


def model_of(architecture: str) -> Any:
    model = tiny_moe(architecture, **ARCHITECTURES[architecture])
    model.config._attn_implementation = "sdpa"
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return model.train()


def loss_of(model_output: dict[str, Any], data: Any, dp_group: Any) -> Any:
    return -model_output["log_probs"].values().mean(), {}


def expected_log_probs(model: Any, routes: list[torch.Tensor] | None) -> torch.Tensor:
    """Return the log-probs of the rolled tokens by transformers alone, a sequence at a time."""
    from hybridengine.integrations import router_replay

    replay, ids = router_replay.attach(model), batch()["input_ids"]
    labels = ids.values().roll(-1).split(LENGTHS)
    results = []
    for i, (sequence, label) in enumerate(zip(ids.unbind(), labels, strict=True)):
        own = None
        if routes is not None:
            own = routes[i].clone()
            own[-1] = -1
        replayed = nullcontext() if own is None else replay.replay(own)
        with torch.no_grad(), replayed:
            logits = model(input_ids=sequence[None], use_cache=False).logits[0]
        results.append(logits.log_softmax(-1).gather(1, label[:, None])[:, 0])
    return torch.cat(results)


def step(engine: Engine, data: Batch, forward_only: bool = True) -> dict[str, Any]:
    """Return the output of verl's forward_step; unless `forward_only` after a backward pass."""
    with torch.set_grad_enabled(not forward_only):
        loss, output = engine.forward_step(data, None if forward_only else loss_of, forward_only)
    if not forward_only:
        loss.backward()
    return output


def packed(rank: int, strategy: str, architecture: str, kind: str, pad: bool) -> None:
    model = model_of(architecture)
    plain = copy.deepcopy(model)
    engine = build(kind, "R3", strategy, pad_to_length=pad)
    engine.module = engine._build_fsdp_module(model)

    natural = step(engine, batch(enable_routing_replay=False))["model_output"]
    torch.testing.assert_close(
        natural["log_probs"].values(), expected_log_probs(plain, None), **CLOSE
    )
    routes = draw_routes()
    data = batch(routed_experts=jagged(routes))
    output = step(engine, data)
    expected = expected_log_probs(plain, routes)
    torch.testing.assert_close(output["model_output"]["log_probs"].values(), expected, **CLOSE)
    assert not torch.allclose(natural["log_probs"].values(), expected, **CLOSE)
    assert "routed_experts" not in output["model_output"] and not output["metrics"]

    trained = step(engine, data, forward_only=False)
    torch.testing.assert_close(trained["model_output"]["log_probs"].values(), expected, **CLOSE)
    assert 0 < trained["metrics"]["actor/routing_mismatched_tokens"] <= 1
    if strategy == "fsdp2":  # FSDP1 has flat parameters
        routers = [p for n, p in engine.module.named_parameters() if n.endswith("gate.weight")]
        assert len(routers) == LAYERS
        assert all(p.grad is not None and bool(p.grad.full_tensor().any()) for p in routers)
    # The reference's batches have the column, too, and are not marked.
    reference = step(engine, batch(enable_routing_replay=False, routed_experts=jagged(routes)))
    assert torch.equal(
        reference["model_output"]["log_probs"].values(), natural["log_probs"].values()
    )
    missing = message_of(lambda: step(engine, batch()))
    assert "router_replay.mode=R3: the batch has no routed_experts" in missing


def recorded(rank: int, strategy: str, architecture: str, kind: str, pad: bool) -> None:
    """R2: the old log-probs record; the update replays what it had selected itself."""
    engine = build(kind, "R2", strategy, pad_to_length=pad)
    engine.module = engine._build_fsdp_module(model_of(architecture))
    old = step(engine, batch())["model_output"]
    routes = old["routed_experts"]
    assert routes.values().shape == (sum(LENGTHS), LAYERS, TOP_K)
    assert routes.dtype == torch.int16 and torch.equal(
        routes.offsets().cpu(), batch()["input_ids"].offsets()
    )
    update = step(engine, batch(routed_experts=routes), forward_only=False)
    assert torch.equal(update["model_output"]["log_probs"].values(), old["log_probs"].values())
    assert update["metrics"] == {"actor/routing_mismatched_tokens": 0.0}
    other = [x.roll(1, 1) for x in routes.unbind()]  # of the other layer
    assert "routed_experts" not in step(engine, batch(routed_experts=jagged(other)))["model_output"]
    changed = step(engine, batch(routed_experts=jagged(other)), forward_only=False)
    assert changed["metrics"]["actor/routing_mismatched_tokens"] > 0
    missing = message_of(lambda: step(engine, batch(), forward_only=False))
    assert "router_replay.mode=R2: the batch has no routed_experts" in missing


def ulysses(rank: int, pad: bool) -> None:
    """Each rank has half of the tokens: what it records and replays are those, padding included."""
    from verl.utils.ulysses import set_ulysses_sequence_parallel_group

    from hybridengine.moe.router_replay import RouterReplay

    engine = build("Qwen3Moe", "R2", "fsdp2", pad_to_length=pad, ulysses_sequence_parallel_size=2)
    engine.module = engine._build_fsdp_module(model_of("qwen3_moe"))
    set_ulysses_sequence_parallel_group(engine.ulysses_parallel_group)
    replay = RouterReplay.of(engine.module)
    total = 16 if pad else sum(LENGTHS)
    data = batch()
    inputs, _ = engine.prepare_model_inputs(data)
    assert inputs["input_ids"].shape == (1, total // 2)
    with torch.no_grad(), replay.record(total // 2) as call:
        engine.module(**inputs, use_cache=False)
    old = step(engine, data)["model_output"]
    routes = old["routed_experts"].values()
    own = torch.arange(total // 2) + rank * total // 2
    inside = own < sum(LENGTHS)
    assert torch.equal(routes[own[inside]], call.routes[inside])
    update = step(engine, batch(routed_experts=old["routed_experts"]), forward_only=False)
    assert update["metrics"] == {"actor/routing_mismatched_tokens": 0.0}
    assert torch.equal(update["model_output"]["log_probs"].values(), old["log_probs"].values())
    set_ulysses_sequence_parallel_group(None)


def refusals() -> dict[str, str]:
    from verl.workers.engine_workers import ActorRolloutRefWorker

    def start(mode: str, from_rollout: bool) -> str:
        config = SimpleNamespace(
            actor=SimpleNamespace(strategy="fsdp2", fsdp_config={"router_replay": {"mode": mode}}),
            rollout=SimpleNamespace(enable_rollout_routing_replay=from_rollout),
        )
        return message_of(lambda: ActorRolloutRefWorker(config, "actor"))

    def padded() -> None:
        engine = build("Qwen3Moe", "R3", "fsdp2", use_remove_padding=False)
        engine._build_fsdp_module(model_of("qwen3_moe"))

    return {
        "R3 and False": start("R3", False),
        "R2 and True": start("R2", True),
        "router_replay.mode: got R4": start("R4", True),
        "model.use_remove_padding": message_of(padded),
    }


def _fsdp1_on_cpu() -> None:
    """FSDP1 copies the states of rank 0 on accelerators only; here ranks build equal models."""
    from verl.workers.engine.fsdp import transformer_impl

    class Wrapper(transformer_impl.FSDP):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options | {"sync_module_states": False})

    transformer_impl.FSDP = Wrapper


def body(rank: int, world_size: int) -> dict[str, str]:
    with empty_services():
        importlib.import_module("tools.trainers._verl_cpu")  # before verl's engines
        from verl.utils import tensordict_utils

        import hybridengine.integrations.verl.router_replay  # noqa: F401
    _fsdp1_on_cpu()
    tensordict_utils.unwrap_non_tensor_data = lambda value: value
    for strategy, pad in (("fsdp", False), ("fsdp2", False), ("fsdp2", True)):
        packed(rank, strategy, "qwen3_moe", "Qwen3Moe", pad)
        recorded(rank, strategy, "qwen3_moe", "Qwen3Moe", pad)
    ulysses(rank, pad=False)
    ulysses(rank, pad=True)
    return refusals()


def test_the_engine_of_verl_replays_and_records_routes() -> None:
    for messages in run_ranks(body, 2):
        for text, message in messages.items():
            assert text in message
