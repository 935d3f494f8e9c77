"""`model.cuda_graphs`: captured passes have the bits of the same passes without a capture."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from hybridengine.compile.decoder import GraphedDecoder
from hybridengine.compile.graphs import CudaGraphs
from hybridengine.model import pack_rollouts, packed_cross_entropy, packed_log_probs
from hybridengine.model.attention import sequence_ends_given
from hybridengine.model.extensions import ModelHook, add_hook
from hybridengine.model.head import patch_head
from hybridengine.model.lora import adapters_disabled, apply_lora
from hybridengine.run.errors import ModelError
from tests.graph_recorder import Recorder
from tests.model.cases import LOGITS, load, models, rollouts
from tests.ranks import message_of, run_ranks
from tests.tiny_models import save_tiny

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
# Three rounded numbers of tokens (64, 128, 192), of few and of many sequences.
BATCHES = [
    [(20, 30)],
    [(3, 9)] * 9,
    [(60, 2), (40, 53), (5, 8)],
    [(1, 1)] * 8,
    [(40, 60), (5, 7)],
    [(31, 33)],
    [(60, 2), (50, 9), (30, 30)],
]


def graphs_on(device: str) -> Recorder | CudaGraphs:
    return Recorder() if device == "cpu" else CudaGraphs()


def pair(kind: str, device: str = "cpu", rank: int = 0):
    """A model that is captured, and the same one that is not."""
    model, _ = models(kind)
    if rank:
        apply_lora(model, rank, 8.0)
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                nn.init.normal_(parameter, std=0.1)
    plain = copy.deepcopy(model).to(device)
    patch_head(model.to(device))
    patch_head(plain)
    return model, plain, GraphedDecoder(model, graphs_on(device))


def batch_of(sizes, device: str = "cpu", seed: int = 0):
    return pack_rollouts(rollouts(sizes, seed), device)


def padded(batch, tokens: int):
    """The batch with one more sequence of so many tokens in all, without rows."""
    count = tokens - batch.input_ids.numel()
    filler = torch.arange(count, device=batch.input_ids.device)
    ends = batch.cu_seqlens
    return replace(
        batch,
        input_ids=torch.cat([batch.input_ids, torch.zeros_like(filler)]),
        position_ids=torch.cat([batch.position_ids, filler]),
        cu_seqlens=torch.cat([ends, ends.new_tensor([tokens] if count else [])]),
        max_seqlen=max(batch.max_seqlen, count),
    )


def warm(model, batch) -> None:
    """Run the first pass of each kind, which is not padded."""
    packed_cross_entropy(model, batch, 1.0)
    with torch.no_grad():
        packed_cross_entropy(model, batch, 1.0)


def rounded(batch) -> int:
    return -(-batch.input_ids.numel() // 64) * 64


def gradients(model) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def differing(found, expected) -> list[str]:
    assert found.keys() == expected.keys()
    return [name for name in found if not torch.equal(found[name], expected[name])]


def step(one, batches) -> None:
    """Add the gradients of micro-batches, each with another factor."""
    for factor, batch in enumerate(batches, 1):
        (packed_cross_entropy(one, batch, 32.0) * factor).backward()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", ["llama", "gemma2"])
def test_log_probs_and_gradients_are_those_of_eager_passes(kind: str, device: str) -> None:
    model, plain, graphed = pair(kind, device)
    captured = []
    warm(model, batch_of(BATCHES[0], device))
    for number in range(3):
        batches = [batch_of(x, device, 17 * number + i) for i, x in enumerate(BATCHES)]
        same = [padded(batch, rounded(batch)) for batch in batches]
        with torch.no_grad():
            for batch, other in zip(batches[number:], same[number:], strict=True):
                found, expected, alone = (
                    packed_log_probs(*given)[0]
                    for given in ((model, batch), (plain, other), (plain, batch))
                )
                assert torch.equal(found, expected)
                torch.testing.assert_close(found, alone, **LOGITS)
        step(model, batches)
        step(plain, same)
        assert not differing(gradients(model), gradients(plain))
        for one in (model, plain):  # written in place, as an optimizer and a sync do
            with torch.no_grad():
                for parameter in one.parameters():
                    parameter -= 0.01 * parameter.grad
            one.zero_grad(set_to_none=number > 0)
        if device == "cpu":
            captured.append(len(graphed.graphs.captured))
    if device == "cpu":  # by the third step all is captured
        assert captured[1] == captured[2] and graphed.graphs.replayed > 30


def test_adapters_and_the_policy_without_them() -> None:
    model, plain, graphed = pair("qwen2", rank=4)
    for seed in range(5):
        batch = batch_of([(20, 30)], seed=seed)
        same = padded(batch, 64 if seed else 50)
        step(model, [batch])
        step(plain, [same])
        for one in (model, plain):
            assert one.model.embed_tokens.weight.grad is None
        assert not differing(gradients(model), gradients(plain))
        with adapters_disabled(model), adapters_disabled(plain), torch.no_grad():
            reference, _ = packed_log_probs(model, batch)
            assert torch.equal(reference, packed_log_probs(plain, same)[0])
        with torch.no_grad():
            assert not torch.allclose(packed_log_probs(model, batch)[0], reference, atol=0.1)
    assert len(graphed.graphs.captured) == 4


def train_body(rank: int, world_size: int, path: str, device: str) -> list[dict]:
    """Weights after steps in bfloat16 over float32 masters: captured, and eager over padding."""
    from hybridengine.model import Optimizer

    results = []
    for is_captured in (True, False):
        model = load(path, world_size, torch.bfloat16, device=device)
        if is_captured:
            GraphedDecoder(model, graphs_on(device))
            warm(model, batch_of(BATCHES[0], device))
        optimizer = Optimizer(model, lr=1e-2, total_steps=9)
        for seed in range(4):
            batches = [batch_of(x, device, seed) for x in (BATCHES[0], BATCHES[5], BATCHES[0])]
            step(model, batches if is_captured else [padded(b, rounded(b)) for b in batches])
            optimizer.step(1.0)
        results.append({name: p.detach().cpu() for name, p in model.named_parameters()})
    return results


@pytest.mark.multirank
@pytest.mark.parametrize("device", DEVICES)
def test_steps_over_masters_are_those_of_eager_passes(tmp_path: Path, device: str) -> None:
    path = save_tiny("llama", tmp_path)  # its head is the embedding
    ((found, expected),) = run_ranks(train_body, 1, path, device, device=device)
    assert not differing(found, expected)


def sharded_body(rank: int, world_size: int, path: str) -> str:
    model = load(path, world_size)
    GraphedDecoder(model, Recorder())
    return message_of(lambda: packed_log_probs(model, batch_of([(20, 30)])))


@pytest.mark.multirank
def test_gathered_weights_are_refused(tmp_path: Path) -> None:
    path = save_tiny("llama", tmp_path)
    for message in run_ranks(sharded_body, 2, path):
        assert "FSDP2 gathers the weights" in message and "fsdp_size=1" in message


def test_gradient_checkpointing() -> None:
    model, plain, graphed = pair("llama")
    for one in (model, plain):
        one.gradient_checkpointing_enable({"use_reentrant": False})
        for layer in one.model.layers:
            layer.training = True
    for seed in range(4):
        batch = batch_of([(20, 30)], seed=seed)
        step(model, [batch])
        step(plain, [padded(batch, 64 if seed else 50)])
    assert not differing(gradients(model), gradients(plain))
    assert graphed.graphs.replayed == 4


def test_results_stay_when_later_passes_run() -> None:
    model, plain, _ = pair("llama")  # the gradient of a tied embedding, of the decoder alone
    batch = batch_of([(20, 44)])
    ends = {"cu_seq_lens_q": batch.cu_seqlens, "cu_seq_lens_k": batch.cu_seqlens}
    given = ends | {"max_length_q": 64, "max_length_k": 64, "use_cache": False}
    given["position_ids"] = batch.position_ids[None]
    results = [[], []]
    for one, kept in zip((model, plain), results, strict=True):
        for factor in range(1, 6):
            with sequence_ends_given():
                ids = batch.input_ids.roll(factor)[None]
                kept.append(one.model(input_ids=ids, **given).last_hidden_state)
            (kept[-1] * factor).square().sum().backward()
    assert all(map(torch.equal, *results))
    assert not differing(gradients(model), gradients(plain))


def test_weights_in_other_memory_are_captured_again() -> None:
    model, plain, graphed = pair("llama")
    for seed in range(7):
        batch = batch_of([(20, 30)], seed=seed)
        if seed == 4:
            for parameter in model.parameters():
                parameter.data = parameter.data.clone()
        with torch.no_grad():
            found, _ = packed_log_probs(model, batch)
            same = padded(batch, 64 if seed else 50)
            assert torch.equal(found, packed_log_probs(plain, same)[0])
    assert len(graphed.graphs.captured) == 2


def test_a_backward_comes_before_the_next_forward_and_once() -> None:
    model, _, _ = pair("llama")
    batch = batch_of([(20, 30)])
    warm(model, batch)
    for _ in range(3):
        first = packed_cross_entropy(model, batch, 1.0)
        packed_cross_entropy(model, batch, 1.0).backward()
        with pytest.raises(ModelError, match="a later pass has overwritten"):
            first.backward()


class ReadsInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * grad.sum().item()


SCALE = torch.full((128,), 2.0)
REFUSED = {
    "waits": (lambda x: x * x.sum().item(), r"item reads values .*test_cuda_graphs\.py:\d+"),
    "waits in the backward": (
        ReadsInBackward.apply,
        r"reads values.*grad\.sum\(\)",
    ),
    "random": (lambda x: nn.functional.dropout(x, 0.1), r"draws random numbers.*dropout\(x"),
    "other tensor": (lambda x: x * SCALE, r"reads a tensor \[128\].*x \* SCALE"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_captured_is_named_with_its_line(name: str) -> None:
    model, _, _ = pair("llama")
    operation, message = REFUSED[name]
    mlp = model.model.layers[0].mlp
    mlp.forward = lambda x, forward=mlp.forward: operation(forward(x))
    batch = batch_of([(20, 30)])
    warm(model, batch)
    with pytest.raises(ModelError, match="(?s)model.cuda_graphs is true.*" + message):
        step(model, [batch])


def test_what_a_replay_would_not_call_is_refused() -> None:
    model, plain, _ = pair("llama")
    pairs = [([5, 6, 7], [8, 9]), ([5, 6, 7], [10])]
    with pytest.raises(ModelError, match=r"the tensor subtree_ends .*actor\.shared_prefix=off"):
        packed_log_probs(model, pack_rollouts(pairs, shared_prefix=True))
    batch = batch_of([(20, 30)])
    embeds = model.model.embed_tokens(batch.input_ids[None])
    ends = {"cu_seq_lens_q": batch.cu_seqlens, "cu_seq_lens_k": batch.cu_seqlens}
    with pytest.raises(ModelError, match="no input_ids"):
        model(inputs_embeds=embeds, max_length_q=50, max_length_k=50, **ends)
    ids, positions = batch.input_ids[None], batch.position_ids[None]
    options = {"use_cache": False, "output_hidden_states": True, "max_length_q": 50, **ends}
    with sequence_ends_given():
        model(input_ids=ids, position_ids=positions, max_length_k=50, **options)
        with pytest.raises(ModelError, match="returns 4 tensors"):
            model(input_ids=ids, position_ids=positions, max_length_k=50, **options)
    assert torch.equal(model(input_ids=ids).logits, plain(input_ids=ids).logits)  # not packed

    class Recording(ModelHook):
        def forward(self, batch):
            return nullcontext()

    model, _, _ = pair("llama")
    add_hook(model, Recording())
    with pytest.raises(ModelError, match="Recording takes part"):
        packed_log_probs(model, batch)
