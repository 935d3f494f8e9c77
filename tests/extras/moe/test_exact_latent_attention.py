"""Latent attention and rotary embeddings with exact operators, as the trained model has them."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PretrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from hybridengine.model.attention import ATTENTION
from hybridengine.model.exact import use_exact_operators
from hybridengine.model.validation import auto_class
from tests.extras.moe.exact_mixtures import mixture_config

TOKENS = 150


def exact_model(kind: str, dtype: torch.dtype) -> tuple[Any, Any]:
    """Return a tiny model with exact operators, and transformers' own in float64."""
    config = mixture_config(kind)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model: Any = auto_class(config).from_config(config, attn_implementation=ATTENTION)
    model.to(dtype).eval()
    plain = copy.deepcopy(model).double()
    plain.set_attn_implementation("eager")
    use_exact_operators(model, {})
    return model.model, plain.model


def attend(decoder: Any, x: Tensor, first: int = 0) -> Tensor:
    """Return the first layer's attention of `x` [B, T, H] at the positions from `first` on."""
    positions = torch.arange(first, first + x.shape[1])[None].expand(len(x), -1)
    embeddings = decoder.rotary_emb(x, positions)
    attention, mask = decoder.layers[0].self_attn, None
    if decoder.config._attn_implementation == "eager":
        hidden = torch.full((x.shape[1],) * 2, float("-inf"), dtype=x.dtype)
        mask = hidden.triu(1)
        if window := getattr(attention, "sliding_window", None):
            mask += hidden.tril(-window)
        mask = mask[None, None]
    out: Tensor = attention(hidden_states=x, position_embeddings=embeddings, attention_mask=mask)[0]
    return out


@pytest.mark.parametrize("kind", ["deepseek_v2", "deepseek_v3", "glm4_moe_lite", "gpt_oss"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_tokens_bits_depend_on_its_sequence_alone(kind: str, dtype: torch.dtype) -> None:
    decoder, oracle = exact_model(kind, dtype)
    x = torch.randn(3, TOKENS, 128, generator=torch.Generator().manual_seed(1)).to(dtype)
    x.requires_grad_()
    together = attend(decoder, x)
    threads = torch.get_num_threads()
    with torch.no_grad():
        for count, length in ((1, TOKENS), (3, 1), (1, 7), (3, 101)):
            torch.set_num_threads(count)
            for row in range(3):
                alone = attend(decoder, x[row : row + 1, :length])
                assert torch.equal(alone[0], together[row, :length]), (count, length)
    torch.set_num_threads(threads)
    wide = x.detach().double().requires_grad_()
    # Angles of transformers are float32 in any dtype.
    expected = attend(oracle, wide)
    limit = 2e-5 if dtype is torch.float32 else 0.05
    assert (together - expected).abs().max() < limit * expected.abs().max()
    grad = torch.randn(expected.shape, generator=torch.Generator().manual_seed(2))
    together.backward(grad.to(dtype))
    expected.backward(grad.double())
    own, other = (m.layers[0].self_attn for m in (decoder, oracle))
    pairs = [(x.grad, wide.grad)]
    pairs += [(p.grad, other.get_parameter(n).grad) for n, p in own.named_parameters()]
    for ours, theirs in pairs:
        assert ours is not None and theirs is not None
        assert (ours - theirs).abs().max() < limit * theirs.abs().max()


@pytest.mark.parametrize("scaling", [4.0, 32.0, 1.0])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"truncate": False},
        {"beta_fast": 16.0, "beta_slow": 2.0},
        {"mscale": 1.0, "mscale_all_dim": 0.7},
        {"attention_factor": 1.2},
    ],
)
def test_yarn_has_vllms_frequencies(scaling: float, options: dict[str, Any]) -> None:
    pytest.importorskip("vllm", reason="the rollout engine; `make setup` installs it")
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.rotary_embedding import get_rope

    rope = dict(rope_type="yarn", rope_theta=1e4, factor=scaling, **options)
    rope["original_max_position_embeddings"] = 128
    config = PretrainedConfig(
        head_dim=32, hidden_size=128, num_attention_heads=4, max_position_embeddings=512
    )
    config.rope_parameters = dict(rope)
    frequencies, factor = ROPE_INIT_FUNCTIONS["yarn"](config)
    with set_current_vllm_config(VllmConfig()):
        theirs: Any = get_rope(32, max_position=512, rope_parameters=rope, is_neox_style=True)
    assert torch.equal(theirs._compute_inv_freq(theirs.scaling_factor), frequencies)
    assert theirs.mscale == pytest.approx(factor, rel=0, abs=0)
