"""Log-probs straight from hidden states against those from whole logits, also under FSDP2."""

from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM

from hybridengine.model import ModelError, pack_rollouts, packed_log_probs
from hybridengine.model.attention import ATTENTION
from hybridengine.model.head import LogProbsOf, gives_log_probs, logit_shape, prepare_head
from tests.model.test_packed import GRADIENTS, LOGITS, SIZES, gradients, rollouts
from tests.model.test_sharded import load, share, whole
from tests.ranks import run_ranks
from tests.tiny_models import TINY, save_tiny, tiny_config

TEMPERATURE = 0.7
_SMALL = dict(vocab_size=101, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
              num_attention_heads=4, num_key_value_heads=2, pad_token_id=0, bos_token_id=1,
              eos_token_id=2)  # fmt: skip


def model_of(config, use_fused_kernels: bool):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION).eval()
    prepare_head(model, use_fused_kernels)
    assert gives_log_probs(model) == use_fused_kernels
    return model


def loss_of(log_probs: torch.Tensor, entropy: torch.Tensor) -> torch.Tensor:
    return (log_probs * torch.linspace(-1, 1, log_probs.numel())).sum() + 0.1 * entropy.sum()


def assert_same_log_probs_and_gradients(config) -> None:
    batch, found = pack_rollouts(rollouts(SIZES)), []
    for fused in (False, True):
        model = model_of(config, fused)
        results = packed_log_probs(model, batch, TEMPERATURE)
        found.append((results, gradients(model, loss_of(*results))))
    (expected, expected_gradients), (got, got_gradients) = found
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


def test_what_is_done_to_logits_is_found():
    def shape(change):
        model = AutoModelForCausalLM.from_config(tiny_config("llama"))
        plain = type(model).forward

        def forward(self, *args, **kwargs):
            out = plain(self, *args, **kwargs)
            out.logits = change(out.logits)
            return out

        model.forward = forward.__get__(model)
        return logit_shape(model, model.lm_head)

    assert shape(lambda x: x) == (1.0, None)
    assert shape(lambda x: x * 0.125) == (0.125, None)
    assert shape(lambda x: 30 * torch.tanh(x / 30)) == (1.0, 30.0)
    for change in (lambda x: x + 1, lambda x: -x, lambda x: x.clamp(max=5), lambda x: x[..., :4]):
        assert shape(change) is None


def test_models_that_do_more_to_their_logits_keep_them():
    model = AutoModelForCausalLM.from_config(tiny_config("llama"), attn_implementation=ATTENTION)
    plain = type(model).forward

    def forward(self, *args, **kwargs):
        out = plain(self, *args, **kwargs)
        out.logits = out.logits + 1
        return out

    model.forward = forward.__get__(model)
    with pytest.warns(UserWarning, match="LlamaForCausalLM does more to its logits"):
        prepare_head(model)
    assert not gives_log_probs(model)


def test_no_logits_outside_of_the_operator():
    """Which keeps to its budget: tests/kernels/test_linear_logprob.py."""
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
    model = model_of(tiny_config("llama"), True)
    with pytest.raises(ModelError, match=r"gave its head 3 positions where 1 were asked for"):
        model(
            input_ids=torch.tensor([[5, 6, 7]]), use_cache=False,
            log_probs_of=LogProbsOf(torch.tensor([5]), 1.0, None),
        )  # fmt: skip
    assert model(input_ids=torch.tensor([[5, 6, 7]])).logits.shape == (1, 3, 101)


def ranks_body(rank: int, world_size: int, path: str) -> None:
    """bfloat16 compute and sharded gradients: what differs is one rounding of the gradient."""
    for dtype, tolerance in ((torch.float32, GRADIENTS), (torch.bfloat16, dict(rtol=0, atol=0.03))):
        found = []
        for fused in (False, True):
            model = load(path, world_size, dtype, use_fused_kernels=fused)
            batch = pack_rollouts(share(rollouts(SIZES), rank, world_size))
            with torch.no_grad():  # as old log-probs are computed before the step
                before = packed_log_probs(model, batch, TEMPERATURE)[0]
            results = packed_log_probs(model, batch, TEMPERATURE)
            assert torch.equal(before, results[0])
            (loss_of(*results) * world_size).backward()
            found.append((results, whole(model, lambda p: p.grad)))
        for got, expected in zip(found[1][0], found[0][0], strict=True):
            torch.testing.assert_close(got, expected, **LOGITS)
        for name, expected in found[0][1].items():
            scale = expected.abs().max()
            torch.testing.assert_close(
                found[1][1][name] / scale, expected / scale, **tolerance, msg=name
            )


@pytest.mark.multirank
@pytest.mark.parametrize(("kind", "world_size"), [("gemma2", 2), ("qwen2", 4)])
def test_sharded_gradients_equal_those_from_logits(tmp_path: Path, kind: str, world_size: int):
    run_ranks(ranks_body, world_size, save_tiny(kind, tmp_path))
