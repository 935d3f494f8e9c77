"""What modules and functions compute is found by trying, or nothing is."""

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModel
from transformers.activations import ACT2FN
from transformers.models.cohere.modeling_cohere import CohereLayerNorm
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from hybridengine.kernels.recognize import find_activation, find_norm, find_tables
from hybridengine.kernels.rotary import RotaryTable, trained_rotary
from tests.tiny_models import SIZES


class Doubled(nn.LayerNorm):
    def forward(self, x):
        return 2 * super().forward(x)


@pytest.mark.parametrize("device", ("cpu", "meta"))
@pytest.mark.parametrize(
    ("norm", "options"),
    (
        (lambda: LlamaRMSNorm(64), {"round_first": True}),
        (lambda: Gemma2RMSNorm(64), {"offset": 1.0}),
        (lambda: nn.RMSNorm(64, eps=1e-6), {}),
        (lambda: nn.LayerNorm(64), {"centered": True}),
        (lambda: nn.LayerNorm(64, bias=False), {"centered": True}),
        (lambda: CohereLayerNorm((4, 64)), {"centered": True}),
        (lambda: Doubled(64), None),
        (lambda: nn.LayerNorm(64, elementwise_affine=False), None),
    ),
)
def test_norms(device, norm, options):
    with torch.device(device):
        module = norm()
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    assert find_norm(module, eps) == options
    assert find_norm(module, None) is None


@pytest.mark.parametrize(
    ("name", "expected"),
    (
        ("silu", "silu"),
        ("gelu", "gelu"),
        ("gelu_new", "gelu_tanh"),
        ("gelu_pytorch_tanh", "gelu_tanh"),
        ("quick_gelu", None),
        ("relu", None),
    ),
)
def test_activations(name, expected):
    assert find_activation(ACT2FN[name]) == expected


@pytest.mark.parametrize(
    ("kind", "dtype", "is_rounded"),
    (
        ("cohere", torch.float32, True),
        ("ernie4_5", torch.float32, False),
        ("glm4", torch.bfloat16, True),
    ),
)
def test_tables_of_neighbours(kind, dtype, is_rounded):
    with torch.device("meta"):
        decoder = AutoModel.from_config(AutoConfig.for_model(kind, **SIZES))
    rotary = type(decoder.rotary_emb)(decoder.config)
    given = RotaryTable(rotary.inv_freq).rows(torch.arange(100))
    found = find_tables(decoder, *given)
    assert found is not None
    for table, exact in zip(found, given, strict=True):
        assert table.dtype == dtype and len(table) == 100
        assert torch.equal(table.float(), exact.bfloat16().float() if is_rounded else exact)


@pytest.mark.parametrize("kind", ("llama", "olmo2", "ernie4_5", "cohere"))
def test_a_rotary_embedding_keeps_its_form_in_every_dtype(kind):
    with torch.device("meta"):
        decoder = AutoModel.from_config(AutoConfig.for_model(kind, **SIZES))
    rotary, positions = type(decoder.rotary_emb)(decoder.config), torch.tensor([[0, 70, 3]])
    for dtype in (torch.float32, torch.bfloat16, torch.float32):
        x = torch.zeros(1, 3, 8, dtype=dtype)
        for ours, own in zip(
            trained_rotary(rotary, x, positions), rotary(x, positions), strict=True
        ):
            torch.testing.assert_close(ours, own)  # their dtypes, too


def test_tables_of_another_rotation_are_not_found():
    with torch.device("meta"):
        decoder = AutoModel.from_config(AutoConfig.for_model("llama", **SIZES))
    angles = torch.randn(100, 16)
    assert find_tables(decoder, angles.cos(), angles.sin()) is None
