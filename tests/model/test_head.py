"""Log-probs computed from hidden states equal those from full logits, also under FSDP2."""

import functools
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM

from hybridengine.model import pack_rollouts, packed_log_probs, packed_logits
from hybridengine.model.attention import ATTENTION
from hybridengine.model.forward import packed_head
from hybridengine.model.head import (
    Float32Product,
    accepts_head_function,
    detect_logit_transform,
    float32_linear,
    patch_head,
)
from hybridengine.run.errors import ModelError
from tests.model.cases import (
    GRADIENTS,
    LOGITS,
    SIZES,
    full_tensors,
    gradients,
    load,
    pairs_of_rank,
    rollouts,
)
from tests.ranks import run_ranks
from tests.tiny_models import TINY, save_tiny, tiny_config

TEMPERATURE = 0.7
_SMALL = dict(
    vocab_size=101,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
)


def model_of(config, use_fused_kernels: bool):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION).eval()
    patch_head(model, use_fused_kernels)
    assert accepts_head_function(model) == use_fused_kernels
    return model


def loss_of(log_probs: torch.Tensor, entropy: torch.Tensor) -> torch.Tensor:
    return (log_probs * torch.linspace(-1, 1, log_probs.numel())).sum() + 0.1 * entropy.sum()


def assert_same_log_probs_and_gradients(config) -> None:
    batch, results_by_mode = pack_rollouts(rollouts(SIZES)), []
    for fused in (False, True):
        model = model_of(config, fused)
        results = packed_log_probs(model, batch, TEMPERATURE)
        results_by_mode.append((results, gradients(model, loss_of(*results))))
    (expected, expected_gradients), (got, got_gradients) = results_by_mode
    for g, e in zip(got, expected, strict=True):
        assert g.dtype == torch.float32
        torch.testing.assert_close(g, e, **LOGITS)
    for name, e in expected_gradients.items():
        scale = e.abs().max()
        torch.testing.assert_close(got_gradients[name] / scale, e / scale, **GRADIENTS, msg=name)


@pytest.mark.parametrize("kind", TINY)
def test_fused_equals_unfused(kind):
    assert_same_log_probs_and_gradients(tiny_config(kind))


@pytest.mark.parametrize(
    ("model_type", "settings"),
    [("cohere", {"logit_scale": 0.3}), ("granite", {"logits_scaling": 7.0}), ("phi", {})],
)
def test_scaled_logits_and_a_head_with_bias(model_type, settings):
    assert_same_log_probs_and_gradients(AutoConfig.for_model(model_type, **_SMALL, **settings))


def test_logit_transform_is_detected():
    def shape(change):
        model = AutoModelForCausalLM.from_config(tiny_config("llama"))
        plain = type(model).forward

        def forward(self, *args, **kwargs):
            out = plain(self, *args, **kwargs)
            out.logits = change(out.logits)
            return out

        model.forward = forward.__get__(model)
        return detect_logit_transform(model, model.lm_head)

    assert shape(lambda x: x) == (1.0, None)
    assert shape(lambda x: x * 0.125) == (0.125, None)
    assert shape(lambda x: 30 * torch.tanh(x / 30)) == (1.0, 30.0)
    for change in (lambda x: x + 1, lambda x: -x, lambda x: x.clamp(max=5), lambda x: x[..., :4]):
        assert shape(change) is None


def test_models_with_other_transforms_compute_logits():
    model = AutoModelForCausalLM.from_config(tiny_config("llama"), attn_implementation=ATTENTION)
    plain = type(model).forward

    def forward(self, *args, **kwargs):
        out = plain(self, *args, **kwargs)
        out.logits = out.logits + 1
        return out

    model.forward = forward.__get__(model)
    with pytest.warns(UserWarning, match="LlamaForCausalLM does more to its logits"):
        patch_head(model)
    assert not accepts_head_function(model)


def test_no_logits_outside_of_the_operator(monkeypatch):
    """The memory of the operator is tested in tests/kernels/linear/test_linear_logprob.py."""
    logprob = sys.modules["hybridengine.kernels.linear.logprob"]
    monkeypatch.setattr(logprob, "keeps_logits", lambda *_: False)
    seen = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            for t in out if isinstance(out, (tuple, list)) else [out]:
                if isinstance(t, torch.Tensor) and t.ndim and t.shape[-1] == 101:
                    seen.append(tuple(t.shape))
            return out

    batch = pack_rollouts(rollouts(SIZES))
    for fused in (False, True):
        seen.clear()
        with Watch():
            loss_of(*packed_log_probs(model_of(tiny_config("llama"), fused), batch)).backward()
        assert bool(seen) is not fused, seen


def test_number_of_positions_is_checked():
    """A model that ignores logits_to_keep passes all positions to its head."""
    model, batch = model_of(tiny_config("llama"), True), pack_rollouts([([5, 6], [7])])
    patched = model.forward
    model.forward = functools.wraps(patched)(
        lambda *args, logits_to_keep, **kwargs: patched(*args, **kwargs)
    )
    for call in (packed_log_probs, packed_logits):
        with pytest.raises(ModelError, match=r"passed 3 positions to its head, expected 1"):
            call(model, batch)


def test_a_head_function_gets_rows_in_any_order():
    """Positions may repeat and be in any order; a model without logits_to_keep gets all rows."""
    model, batch = model_of(tiny_config("gemma2"), True), pack_rollouts([([5, 6, 7], [8, 9, 10])])
    positions = torch.tensor([4, 2, 2, 3])
    chosen = replace(batch, logit_positions=positions)
    every = replace(batch, logit_positions=torch.arange(6))
    given = packed_head(model, every, lambda rows, weight, **head: (rows, weight, head))
    softcap = model.config.final_logit_softcapping
    assert given[2] == {"bias": None, "logit_scale": 1.0, "softcap": softcap}
    assert given[1] is model.get_output_embeddings().weight
    patched = model.forward

    def forward(*args, **kwargs):
        return patched(*args, **kwargs)

    for model.forward in (patched, forward):
        rows = packed_head(model, chosen, lambda rows, weight, **_: (rows,))[0]
        torch.testing.assert_close(rows, given[0][positions])


def ranks_body(rank: int, world_size: int, path: str) -> None:
    """bfloat16 compute and sharded gradients: they differ by one rounding of the gradient."""
    for dtype, tolerance in ((torch.float32, GRADIENTS), (torch.bfloat16, dict(rtol=0, atol=0.03))):
        results_by_mode = []
        for fused in (False, True):
            model = load(path, world_size, dtype, use_fused_kernels=fused)
            batch = pack_rollouts(pairs_of_rank(rollouts(SIZES), rank, world_size))
            with torch.no_grad():  # as old log-probs are computed before the step
                before = packed_log_probs(model, batch, TEMPERATURE)[0]
            results = packed_log_probs(model, batch, TEMPERATURE)
            assert torch.equal(before, results[0])
            (loss_of(*results) * world_size).backward()
            results_by_mode.append((results, full_tensors(model, lambda p: p.grad)))
        for got, expected in zip(results_by_mode[1][0], results_by_mode[0][0], strict=True):
            torch.testing.assert_close(got, expected, **LOGITS)
        for name, expected in results_by_mode[0][1].items():
            scale = expected.abs().max()
            torch.testing.assert_close(
                results_by_mode[1][1][name] / scale, expected / scale, **tolerance, msg=name
            )


@pytest.mark.multirank
@pytest.mark.parametrize(("kind", "world_size"), [("gemma2", 2), ("qwen2", 4)])
def test_sharded_gradients_equal_those_from_logits(tmp_path: Path, kind: str, world_size: int):
    run_ranks(ranks_body, world_size, save_tiny(kind, tmp_path))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_product_of_16_bit_operands_is_not_rounded(device: str, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    rows, weight, grad = (
        torch.randn(size, generator=generator).to(dtype).to(device).requires_grad_()
        for size in ((17, 64), (103, 64), (17, 103))
    )
    out = Float32Product.apply(rows, weight)
    exact = rows.detach().double() @ weight.detach().double().t()
    assert out.dtype == torch.float32
    torch.testing.assert_close(out.detach().double(), exact, rtol=1e-5, atol=1e-4)
    out.backward(grad.detach().float())
    expected = (
        grad.detach().double() @ weight.detach().double(),
        (grad.detach().double().t() @ rows.detach().double()),
    )
    for got, wanted in zip((rows.grad, weight.grad), expected, strict=True):
        assert got.dtype == dtype
        bound = torch.finfo(dtype).eps * wanted.abs().max()
        torch.testing.assert_close(got.double(), wanted, rtol=0, atol=float(bound))
    assert torch.autograd.grad(Float32Product.apply(rows.detach(), weight).sum(), weight)


def test_a_head_on_a_gpu_converts_neither_hidden_states_nor_weight() -> None:
    """On fake CUDA tensors: what would run on a GPU."""
    head = torch.nn.Linear(64, 103, dtype=torch.bfloat16)
    with FakeTensorMode(allow_non_fake_inputs=True):
        head.weight, head.bias = (
            torch.nn.Parameter(torch.empty(p.shape, dtype=p.dtype, device="cuda"))
            for p in (head.weight, head.bias)
        )
        hidden = torch.empty(2, 17, 64, dtype=torch.bfloat16, device="cuda")
        with Casts() as seen, torch.no_grad():
            logits = float32_linear(head, hidden)
    assert logits.shape == (2, 17, 103) and logits.dtype == torch.float32
    assert seen.shapes == [(103,)], "of the bias alone"


class Casts(TorchDispatchMode):
    """The shapes of the tensors that are cast."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[tuple[int, ...]] = []

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        if function.overloadpacket is torch.ops.aten._to_copy:
            self.shapes.append(tuple(arguments[0].shape))
        return function(*arguments, **(options or {}))
