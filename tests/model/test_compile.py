"""Compiled decoder layers: the eager results, in one graph per kind of layer and mode."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch._dynamo.utils import counters

from hybridengine.compile import check_compiler, compile_layers
from hybridengine.kernels import tree_attention
from hybridengine.model import (
    adapters_disabled,
    apply_lora,
    flash_attention,
    pack_rollouts,
    packed_log_probs,
)
from hybridengine.model.head import patch_head
from hybridengine.run.errors import ModelError
from tests.model.cases import GRADIENTS, LOGITS, models, rollouts
from tests.model.forests import group_pairs

LENGTHS = [[(5, 7), (1, 1), (20, 30)], [(3, 9), (60, 2), (4, 0), (5, 7)], [(40, 56)]]


@pytest.fixture(autouse=True)
def fresh_graphs():
    torch._dynamo.reset()
    counters.clear()


def use_backend(monkeypatch, name: str) -> None:
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=name))


@pytest.fixture
def traced(monkeypatch):
    """Compile without generating code: graphs and guards are those of the default backend."""
    use_backend(monkeypatch, "aot_eager")


@pytest.fixture
def traced_forward(monkeypatch):
    """As `traced` without the derivatives of graphs, which take two thirds of the time."""
    use_backend(monkeypatch, "eager")


def num_graphs() -> int:
    return counters["stats"]["unique_graphs"]


def pair_of_models(kind: str = "llama", prepare=lambda model: None):
    """The same model twice, eager and compiled."""
    eager, compiled = models(kind)[0], models(kind)[0]
    for model in (eager, compiled):
        torch.manual_seed(0)
        prepare(model)
        patch_head(model)
    compile_layers(compiled.model.layers)
    return eager, compiled


def results(model, batch):
    """Log-probs, entropy and gradients of a loss that weighs every row differently."""
    log_probs, entropy = packed_log_probs(model, batch)
    weights = torch.linspace(-1, 2, log_probs.shape[0], device=log_probs.device)
    model.zero_grad()
    ((weights * log_probs).sum() + 0.1 * (weights.flip(0) * entropy).sum()).backward()
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return log_probs.detach(), entropy.detach(), gradients


def assert_same_results(eager, compiled, batch) -> None:
    ours, theirs = results(compiled, batch), results(eager, batch)
    for a, b in zip(ours[:2], theirs[:2], strict=True):
        torch.testing.assert_close(a, b, **LOGITS)
    assert ours[2].keys() == theirs[2].keys()
    for name, expected in theirs[2].items():
        scale = expected.abs().max()
        torch.testing.assert_close(ours[2][name] / scale, expected / scale, **GRADIENTS, msg=name)


def checkpoint_layers(model) -> None:
    model.gradient_checkpointing_enable({"use_reentrant": False})
    for layer in model.model.layers:
        layer.training = True


@pytest.mark.slow
def test_generated_code_computes_the_eager_results() -> None:
    eager, compiled = pair_of_models(prepare=checkpoint_layers)
    for sizes in LENGTHS:
        assert_same_results(eager, compiled, pack_rollouts(rollouts(sizes)))
    assert num_graphs() == 1, "for both layers, their recomputation and every length"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_generated_code_on_a_gpu(dtype) -> None:
    eager, compiled = (model.to("cuda", dtype) for model in pair_of_models("qwen2"))
    exact = pair_of_models("qwen2")[0]
    for sizes in LENGTHS:
        pairs = rollouts(sizes)
        batch = pack_rollouts(pairs, "cuda")
        if dtype == torch.float32:
            assert_same_results(eager, compiled, batch)
            continue
        expected = results(exact, pack_rollouts(pairs))[0]
        ours, theirs = (results(m, batch)[0].cpu() - expected for m in (compiled, eager))
        # fused operators round less often; the floor is one rounding of a logit of size 4
        assert ours.square().mean().sqrt() <= 1.5 * theirs.square().mean().sqrt() + 2.0**-7
    assert num_graphs() == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shared_prefix", "backend"),
    [
        (False, "aot_eager"),
        (True, "eager"),
        pytest.param(True, "aot_eager", marks=pytest.mark.exhaustive),
    ],
)
def test_one_graph_per_kind_of_layer_and_mode(monkeypatch, shared_prefix, backend) -> None:
    """Gemma 2 has layers with and without a window."""
    use_backend(monkeypatch, backend)
    eager, compiled = pair_of_models("gemma2")
    batches = (group_pairs(), FOREST) if shared_prefix else map(rollouts, LENGTHS)
    for pairs in batches:
        batch = pack_rollouts(pairs, shared_prefix=shared_prefix)
        assert_same_results(eager, compiled, batch)
        with torch.no_grad():
            ours, theirs = (packed_log_probs(m, batch)[0] for m in (compiled, eager))
        torch.testing.assert_close(ours, theirs, **LOGITS)
    assert num_graphs() == 2 * 2, "training and inference"


FOREST = [([5, 6, 7], [8, 9]), ([5, 6, 7], [8, 10, 11, 12]), ([9], [5, 4, 3])]


@pytest.mark.slow
def test_adapters_can_be_disabled(traced_forward) -> None:
    targets = ["q_proj", "o_proj", "down_proj"]
    eager, compiled = pair_of_models(
        prepare=partial(apply_lora, rank=3, alpha=5.0, target_modules=targets)
    )
    for model in (eager, compiled):
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, generator=torch.Generator().manual_seed(len(name)))
    batch = pack_rollouts(rollouts(LENGTHS[0]))
    assert_same_results(eager, compiled, batch)
    with torch.no_grad():
        adapted = packed_log_probs(compiled, batch)[0]
        with adapters_disabled(eager), adapters_disabled(compiled):
            ours, theirs = (packed_log_probs(m, batch)[0] for m in (compiled, eager))
    torch.testing.assert_close(ours, theirs, **LOGITS)
    assert (ours - adapted).abs().max() > 0.05


@pytest.mark.slow
def test_the_longest_sequence_is_no_constant_of_the_graph(traced, monkeypatch) -> None:
    """As on a GPU, where attention reads it: here from a kernel that needs it to be right."""

    def flash(q, k, v, *, cu_seqlens_q, max_seqlen_q, max_seqlen_k, softmax_scale, **options):
        ends, _ = torch.ops.hybridengine.sequence_layout(cu_seqlens_q, q.shape[0])
        scale = softmax_scale * max_seqlen_q / max_seqlen_k
        return tree_attention(q, k, v, ends, softmax_scale=scale)

    monkeypatch.setattr(flash_attention.FlashKernel, "fits", lambda *_: True)
    monkeypatch.setattr(flash_attention, "chosen_kernel", flash_attention.FlashKernel(flash))
    eager, compiled = pair_of_models("qwen2")
    for sizes in LENGTHS:
        assert_same_results(eager, compiled, pack_rollouts(rollouts(sizes)))
    assert num_graphs() == 1


def test_layers_that_are_not_one_graph_are_named(traced) -> None:
    class DataDependentLayer(torch.nn.Module):
        def forward(self, x):
            return x + 1 if x.sum() > 0 else x - 1

    layer = DataDependentLayer()
    compile_layers([layer])
    with pytest.raises(ModelError, match=r"DataDependentLayer does not compile.*model\.compile=fa"):
        layer(torch.ones(1, 3, 2))


def test_a_missing_compiler_is_named(monkeypatch) -> None:
    check_compiler()
    for variable in ("CC", "CXX"):
        monkeypatch.setenv(variable, "no-such-compiler")
    with pytest.raises(ModelError, match=r"no compiler no-such-compiler.*set model\.compile=false"):
        check_compiler()
