"""verl's FSDP engine over the entries that sampling kept, and what its vLLM server returns.

verl's services (Ray, tensordict, …) are empty here, so a batch is a dict.
"""

from __future__ import annotations

import asyncio
import copy
import importlib
import sys
import types
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch

from hybridengine.engine.vllm.environment import prepare_environment
from tests.extras.integrations.verl_services import empty_services
from tests.ranks import message_of, run_ranks
from tests.tiny_models import VOCAB

pytest.importorskip(
    "benchmarks._verl", reason="pip install --no-deps verl==0.9.1", exc_type=ImportError
)
pytestmark = pytest.mark.multirank
RESPONSES = (3, 1, 2)
WEIGHTS = torch.linspace(-1, 1, sum(RESPONSES))


def columns(batch: Any) -> tuple[list[dict[str, Any]], torch.Tensor, torch.Tensor]:
    """Entries for every response token, bool [R, V] and the rows of the response tokens [R]."""
    generator = torch.Generator().manual_seed(3)
    ids, column, masks, rows = batch["input_ids"], [], [], []
    for sequence, end, length in zip(ids.unbind(), ids.offsets()[1:], RESPONSES, strict=True):
        entries = []
        for token in sequence[-length:]:
            mask = torch.rand(VOCAB, generator=generator) < 0.2
            mask[token] = True
            entries.append(mask.nonzero().flatten().int())
            masks.append(mask)
        if length == 3:  # nothing was cut
            entries[1], masks[-2] = entries[1][:0], torch.ones(VOCAB, dtype=torch.bool)
        counts = np.array([len(x) for x in entries], dtype=np.int32)
        column.append({"ids": torch.cat(entries).numpy(), "counts": counts})
        rows += range(int(end) - length - 1, int(end) - 1)
    return column, torch.stack(masks), torch.tensor(rows)


def expected(model: Any, batch: Any, masks: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Log-probs of the response tokens in float64."""
    ids = batch["input_ids"]
    logits = [model(input_ids=x[None], use_cache=False).logits[0] for x in ids.unbind()]
    kept = torch.cat(logits)[rows].masked_fill(~masks, -torch.inf)
    return kept.log_softmax(-1).gather(1, ids.values().roll(-1)[rows][:, None])[:, 0]


def check_engine(engines: Any, fused: bool) -> None:
    from transformers import AutoModelForCausalLM, LlamaConfig
    from verl.models.transformers.dense_common import forward_with_torch_backend

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        initializer_range=0.2,
        tie_word_embeddings=fused,  # verl's fused forward reads a head in FSDP2's root
    )
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    exact = copy.deepcopy(model).double()
    if fused:
        model.forward = types.MethodType(forward_with_torch_backend, model)
    engine = engines.build("Llama", "disabled", "fsdp2")
    engine.module = engine._build_fsdp_module(model.train())
    batch = engines.batch(enable_routing_replay=False, use_fused_kernels=fused)
    batch["calculate_entropy"] = True
    responses = [x[-n:] for x, n in zip(batch["input_ids"].unbind(), RESPONSES, strict=True)]
    batch |= {"prompts": None, "responses": engines.jagged(responses)}
    column, masks, rows = columns(batch)
    wanted = expected(exact, batch, masks, rows)
    (wanted * WEIGHTS).sum().backward()

    def loss(model_output: dict[str, Any], data: Any, dp_group: Any) -> Any:
        return (model_output["log_probs"].values()[rows] * WEIGHTS).sum(), {}

    plain = engines.step(engine, batch)["model_output"]["log_probs"].values()[rows]
    assert (plain - wanted).abs().max() > 0.5, "over the full vocabulary they are others"
    batch["kept_ids"] = column
    with torch.enable_grad():
        total, output = engine.forward_step(batch, loss, False)
    got = output["model_output"]
    torch.testing.assert_close(
        got["log_probs"].values()[rows].double(), wanted, rtol=1e-5, atol=1e-5
    )
    assert got["entropy"].values().isfinite().all()
    total.backward()
    for (name, parameter), other in zip(
        engine.module.named_parameters(), exact.parameters(), strict=True
    ):
        error = (parameter.grad.full_tensor() - other.grad).abs().max() / other.grad.abs().max()
        assert error < 1e-4, name
    if fused:
        return
    check_a_warning_of_lost_columns(engines, engine, batch)
    column[0]["counts"] = column[0]["counts"][1:]
    message = message_of(lambda: engines.step(engine, batch))
    assert "a response of 3 tokens has the kept vocabulary entries of 2" in message
    engine.use_ulysses_sp = True
    assert "ulysses_sequence_parallel_size" in message_of(lambda: engines.step(engine, batch))
    batch["use_remove_padding"] = False
    assert "use_remove_padding" in message_of(lambda: engines.step(engine, batch))


def check_a_warning_of_lost_columns(engines: Any, engine: Any, batch: dict[str, Any]) -> None:
    from hybridengine.integrations.verl import kept

    with patch.object(kept.logger, "warning") as warning:
        engines.step(engine, batch)
        assert not warning.called, "each response has its own"
        whole = batch["kept_ids"]
        for column in ([None, *whole[1:]], [None] * len(RESPONSES), whole):
            batch["kept_ids"] = column
            engines.step(engine, batch)
    ((message,), _) = warning.call_args
    assert warning.call_count == 1
    assert f"1 of {len(RESPONSES)} responses of a micro-batch come without kept_ids" in message


def engine_body(rank: int, world_size: int, folder: str) -> None:
    from tests.extras.integrations import test_verl_router_replay as engines

    info = Path(folder) / f"{rank}" / "vllm-0.32.0.dist-info"  # which verl looks up
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0\n")
    sys.path.insert(0, str(info.parent))
    prepare_environment()
    with empty_services():
        importlib.import_module("tools.trainers._verl_cpu")  # before verl's engines
        from verl.utils import tensordict_utils

        import hybridengine.integrations.verl.kept  # noqa: F401
    tensordict_utils.unwrap_non_tensor_data = lambda value: value
    tensordict_utils.get = lambda batch, key, default=None: batch.get(key, default)
    for fused in (False, True):
        check_engine(engines, fused)
    asyncio.run(check_server())
    asyncio.run(check_clients())


async def check_server() -> None:
    """verl's own `generate`, with an engine that returns vLLM's outputs."""
    from verl.workers.rollout.vllm_rollout import vllm_async_server
    from vllm.outputs import CompletionOutput, RequestOutput, SamplingMask

    asked = []

    async def generate(prompt: Any, sampling_params: Any, **_: Any) -> AsyncIterator[Any]:
        asked.append(sampling_params)
        mask = SamplingMask([[7, 5], list(range(VOCAB))])
        sample = CompletionOutput(0, "", [5, 9], None, None, finish_reason="stop")
        sample.sampling_mask = mask
        yield RequestOutput("0", None, prompt["prompt_token_ids"], None, [sample], True)

    async def admit(request_id: str) -> None: ...

    class Config(SimpleNamespace):
        def get(self, name: str, default: Any) -> Any:
            return default

    config = Config(top_p=0.9, top_k=-1, max_model_len=32, response_length=8, prompt_length=8)
    config.full_determinism = config.enable_rollout_routing_replay = False
    config.mtp = config.checkpoint_engine = None
    model_config = SimpleNamespace(get_vocab_size=lambda: VOCAB)
    server = SimpleNamespace(
        config=config,
        model_config=SimpleNamespace(processor=None),
        engine=SimpleNamespace(generate=generate, model_config=model_config),
        lora_as_adapter=False,
        replica_rank=0,
        global_steps=3,
        _admitting=1,
        _disaggregation_role=None,
        _pd_decode_peers=None,
        _park_until_admitted=admit,
    )
    kind = vllm_async_server.vLLMHttpServer
    sampling = {"temperature": 1.0, "top_p": 0.9, "top_k": -1, "logprobs": False}
    output = await kind.generate(server, [3, 4], sampling, "0")
    column = output.extra_fields["kept_ids"]
    assert (column["ids"].tolist(), column["counts"].tolist()) == ([5, 7], [2, 0])
    assert (asked[0].top_k, asked[0].top_p) == (VOCAB, 0.9)
    output = await kind.generate(server, [3, 4], sampling | {"temperature": 0}, "1")
    assert (asked[1].top_k, asked[1].temperature) == (1, 1.0) and len(asked) == 2
    assert "kept_ids" not in output.extra_fields
    options: dict[str, Any] = {}
    kind._preprocess_engine_kwargs(server, options)
    assert options == {"return_sampling_mask": True}


async def check_clients() -> None:
    """verl's own client of asynchronous trainers; an update interrupts the first response."""
    from verl.workers.rollout import llm_server
    from verl.workers.rollout.replica import TokenOutput

    def column(*counts: int) -> dict[str, Any]:
        return {"kept_ids": {"ids": np.arange(sum(counts)), "counts": np.array(counts)}}

    outputs = [
        TokenOutput(token_ids=[5, 6], stop_reason="aborted", extra_fields=column(2, 0)),
        TokenOutput(token_ids=[], stop_reason="aborted"),
        TokenOutput(token_ids=[7], stop_reason="completed", extra_fields=column(3)),
        TokenOutput(token_ids=[8], stop_reason="completed"),  # without truncation
    ]

    class Generate:
        @staticmethod
        async def remote(**_: Any) -> Any:
            return outputs.pop(0)

    class Client(llm_server.FullyAsyncLLMServerClient):
        async def _acquire_server(self, *_: Any, **__: Any) -> Any:
            return "0", SimpleNamespace(generate=Generate)

        def _release_server(self, *_: Any, **__: Any) -> None: ...

    rollout = SimpleNamespace(name="vllm", full_determinism=True, response_length=8)
    client = Client(SimpleNamespace(actor_rollout_ref=SimpleNamespace(rollout=rollout)))
    options: Any = {"prompt_ids": [3, 4], "sampling_params": {}}
    output = await client.generate("0", **options)
    entries = output.extra_fields["kept_ids"]
    assert output.token_ids == [5, 6, 7]
    assert (entries["ids"].tolist(), entries["counts"].tolist()) == ([0, 1, 0, 1, 2], [2, 0, 3])
    assert "kept_ids" not in (await client.generate("1", **options)).extra_fields
    assert outputs == []


def test_the_engine_of_verl_computes_over_what_sampling_kept(tmp_path: Path) -> None:
    pytest.importorskip("vllm", reason="the rollout engine; `make setup` installs it")
    run_ranks(engine_body, 1, str(tmp_path), timeout_s=300)
