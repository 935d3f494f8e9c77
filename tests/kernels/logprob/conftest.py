"""In Triton's interpreter (interpreter.py), token_log_probs runs its Triton kernels on the CPU."""

import os

import pytest
import torch

from hybridengine.kernels.logprob import op, rows


@pytest.fixture(autouse=os.environ.get("TRITON_INTERPRET") == "1")
def bad_label(monkeypatch):
    flag = torch.zeros(1, dtype=torch.int32)
    monkeypatch.setattr(rows, "bad_label_flag", lambda device: flag)
    monkeypatch.setattr(
        op,
        "backend_for",
        lambda logits, requested: "reference" if logits.dtype == torch.float64 else "triton",
    )
    return flag
