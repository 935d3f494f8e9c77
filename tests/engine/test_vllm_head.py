"""The engine's float32 logits from a 16-bit head: against float64, and what is left to vLLM."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from tests.tolerances import LINEAR

pytest.importorskip("vllm", reason="the rollout engine; `make setup` installs it")


@pytest.fixture
def processor():
    from hybridengine.engine.vllm.environment import prepare_environment

    prepare_environment()
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.logits_processor import LogitsProcessor

    from hybridengine.engine.exact.operators import use_plain_head

    with set_current_vllm_config(VllmConfig()):
        processor = LogitsProcessor(300)
    processor.head_dtype = torch.float32
    use_plain_head(torch.nn.ModuleList([processor]))
    return processor


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("rows", [0, 1, 37])
@pytest.mark.parametrize("with_bias", [False, True])
def test_logits_are_float32_products(processor, dtype, rows, with_bias):
    from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

    torch.manual_seed(rows)
    weight, hidden = torch.randn(320, 72, dtype=dtype), torch.randn(rows, 72, dtype=dtype)
    bias = torch.randn(320, dtype=dtype) if with_bias else None
    method = UnquantizedEmbeddingMethod()
    head = SimpleNamespace(
        weight=torch.nn.Parameter(weight, requires_grad=False),
        quant_method=method,
        tp_size=1,
        cpu_linear=torch.nn.functional.linear,
    )
    logits = processor._get_logits(hidden, head, bias)
    assert logits.dtype == torch.float32
    expected = hidden.double() @ weight.double().t() + (0 if bias is None else bias.double())
    torch.testing.assert_close(logits.double(), expected[:, :300], **LINEAR)


def test_a_quantized_head_is_left_to_vllm(processor):
    head = SimpleNamespace(weight=torch.zeros(320, 9, dtype=torch.int8), quant_method=None)
    with pytest.raises(ValueError, match="unquantized lm_head"):
        processor._apply_head(head, torch.zeros(2, 72, dtype=torch.bfloat16), None)
