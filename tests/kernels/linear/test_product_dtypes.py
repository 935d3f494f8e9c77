"""The dtypes of matrix products: 16-bit where the machine has fast ones, float32 elsewhere."""

import os

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from hybridengine.kernels import has_fast_products, linear_policy_loss, linear_token_log_probs
from hybridengine.kernels._backend import ISAS, load_extension, native

PRODUCTS = {"aten::mm", "aten::addmm", "aten::addmm_", "aten::bmm", "aten::linear", "aten::matmul"}
OPTIONS = [
    {},
    {"deterministic": True},
    {"budget_bytes": 3 * 300 * 6},  # several chunks: the weight gradient is added to
    {"main_grad": True},
]


def product_dtypes(function) -> set[str]:
    """Operand types of PyTorch's matrix products inside `function`, custom operators included."""
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as trace:
        function()
    events = trace.profiler.kineto_results.events()
    return {
        t for e in events if e.name() in PRODUCTS for t in e.dtypes() if t not in ("", "Scalar")
    }


def test_the_limit_is_respected():
    limit = os.environ.get("HYBRIDENGINE_ISA", ISAS[-1])
    assert ISAS.index(native().cpu_isa) <= ISAS.index(limit)
    if native().cpu_isa != "avx512_bf16":
        assert not has_fast_products(torch.bfloat16) and not has_fast_products(torch.float16)


def test_an_unknown_limit_is_named(monkeypatch):
    monkeypatch.setenv("HYBRIDENGINE_ISA", "avx3")
    with pytest.raises(ValueError, match="HYBRIDENGINE_ISA is 'avx3'; expected portable, avx2"):
        load_extension()


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16))
@pytest.mark.parametrize("op", ("log_probs", "policy_loss"))
@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: next(iter(options), "default"))
def test_products_of_16_bit_inputs(options, op, dtype):
    rows, width, vocab = 40, 64, 300
    hidden, weight = (torch.randn(n, width).to(dtype).requires_grad_() for n in (rows, vocab))
    ids, options = torch.arange(rows), dict(options)
    if options.get("main_grad"):
        options["main_grad"] = torch.zeros(vocab, width)

    def run():
        if op == "log_probs":
            log_probs, entropy = linear_token_log_probs(hidden, weight, ids, **options)
            (log_probs + entropy).sum().backward()
        else:
            loss_inputs = {
                "advantages": torch.ones(rows),
                "old_log_probs": torch.full((rows,), -6.0),
            }
            linear_policy_loss(hidden, weight, ids, **loss_inputs, **options)[0].backward()

    dtypes = product_dtypes(run)
    if has_fast_products(dtype):  # products with a float32 result run in csrc/mixed_gemm
        assert dtypes == {"c10::BFloat16" if dtype == torch.bfloat16 else "c10::Half"}
    else:
        assert dtypes == {"float"}
