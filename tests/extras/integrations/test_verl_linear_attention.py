"""Packed batches of a model with linear attention in the FSDP engine of the installed verl."""

from __future__ import annotations

import copy
import importlib

import pytest
import torch

from tests.extras.hybrid.hybrid_models import hybrid_config
from tests.extras.integrations.verl_services import empty_services
from tests.ranks import message_of, run_ranks

pytest.importorskip(
    "benchmarks._verl", reason="pip install --no-deps verl==0.9.1", exc_type=ImportError
)
pytestmark = pytest.mark.multirank


def body(rank: int, world_size: int) -> dict[str, str]:
    from transformers import AutoConfig, AutoModelForCausalLM

    from tests.extras.integrations import test_verl_router_replay as engines

    with empty_services():
        importlib.import_module("tools.trainers._verl_cpu")  # before verl's engines
        from verl.utils import tensordict_utils

        import hybridengine.integrations.verl.linear_attention  # noqa: F401
    tensordict_utils.unwrap_non_tensor_data = lambda value: value
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        hybrid_config("qwen3_5_text"), attn_implementation="sdpa"
    )
    plain = copy.deepcopy(model).eval()
    engine = engines.build("Qwen3_5", "disabled", "fsdp2")
    engine.module = engine._build_fsdp_module(copy.deepcopy(model).train())
    data = engines.batch(enable_routing_replay=False)
    log_probs = engines.step(engine, data)["model_output"]["log_probs"].values()
    ids, expected = data["input_ids"], []
    labels = ids.values().roll(-1).split(engines.LENGTHS)
    for sequence, label in zip(ids.unbind(), labels, strict=True):
        with torch.no_grad():
            logits = plain(input_ids=sequence[None], use_cache=False).logits[0]
        expected.append(logits.log_softmax(-1).gather(1, label[:, None])[:, 0])
    torch.testing.assert_close(log_probs, torch.cat(expected), **engines.CLOSE)

    with torch.device("meta"):
        other = AutoModelForCausalLM.from_config(AutoConfig.for_model("recurrent_gemma"))
    sharded = engines.build("Qwen3_5", "disabled", "fsdp2", ulysses_sequence_parallel_size=2)
    return {
        "RecurrentGemmaForCausalLM": message_of(lambda: engine._build_fsdp_module(other)),
        "ulysses_sequence_parallel_size: got 2": message_of(
            lambda: sharded._build_fsdp_module(model)
        ),
    }


def test_the_engine_of_verl_keeps_sequences_apart() -> None:
    for messages in run_ranks(body, 2):
        for text, message in messages.items():
            assert text in message
