"""flash_attn's cross-entropy against torch's in float64, and its patch on a stand-in package."""

import sys
from types import ModuleType

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from hybridengine.integrations import flash_attn
from tests.ranks import run_ranks

_IGNORED = -100


def _oracle(logits, labels, smoothing, scale, lse_scale):
    """Losses and z-losses in float64."""
    z = logits.double() * scale
    losses = F.cross_entropy(
        z, labels, ignore_index=_IGNORED, label_smoothing=smoothing, reduction="none"
    )
    z_losses = lse_scale * z.logsumexp(-1).square() * (labels != _IGNORED)
    return losses + z_losses, z_losses


def _inputs(dtype=torch.float32):
    torch.manual_seed(0)
    logits = (torch.randn(9, 37) * 3).to(dtype).requires_grad_()
    labels = torch.randint(0, 37, (9,))
    labels[[2, 7]] = _IGNORED
    return logits, labels


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("scale", [1.0, 0.7])
@pytest.mark.parametrize("smoothing, lse_scale", [(0.0, 0.0), (0.1, 0.0), (0.0, 0.02), (0.9, 0.02)])
def test_losses_and_gradient(smoothing, lse_scale, scale, inplace):
    logits, labels = _inputs()
    exact = logits.detach().double().requires_grad_()
    losses, z_losses = flash_attn.cross_entropy_loss(
        logits.clone(), labels, None, smoothing, scale, lse_scale, inplace_backward=inplace
    )
    expected, expected_z = _oracle(exact, labels, smoothing, scale, lse_scale)
    torch.testing.assert_close(losses.double(), expected, rtol=2e-6, atol=2e-6)
    torch.testing.assert_close(z_losses.double(), expected_z, rtol=2e-6, atol=2e-6)
    assert not z_losses.requires_grad
    weights = torch.randn(9)
    (losses * weights).sum().backward()
    (expected * weights).sum().backward()
    torch.testing.assert_close(logits.grad.double(), exact.grad, rtol=1e-5, atol=1e-6)


def test_gradient_in_bfloat16_of_a_certain_row():
    logits, labels = _inputs(torch.bfloat16)
    with torch.no_grad():
        logits[0, labels[0]] = 40.0
    exact = logits.detach().double().requires_grad_()
    losses, _ = flash_attn.cross_entropy_loss(logits, labels, None, 0.1, 1.0, 1e-4)
    losses.sum().backward()
    _oracle(exact, labels, 0.1, 1.0, 1e-4)[0].sum().backward()
    torch.testing.assert_close(logits.grad.double(), exact.grad, rtol=0.02, atol=1e-4)


def test_ignored_rows_may_hold_nan():
    logits, labels = _inputs()
    with torch.no_grad():
        logits[2] = torch.nan
    losses, z_losses = flash_attn.cross_entropy_loss(logits, labels, None, 0.1, 1.0, 0.01)
    losses.sum().backward()
    assert losses[2] == 0 and z_losses[2] == 0
    assert logits.grad.isfinite().all() and not logits.grad[2].any()


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_module(reduction):
    logits, labels = _inputs()
    module = flash_attn.CrossEntropyLoss(
        reduction=reduction, label_smoothing=0.1, lse_square_scale=0.01, return_z_loss=True
    )
    given = _oracle(logits, labels, 0.1, 1.0, 0.01)
    count = {"mean": 7, "sum": 1, "none": 1}[reduction]
    for actual, losses in zip(module(logits, labels), given, strict=True):
        expected = losses if reduction == "none" else losses.sum() / count
        torch.testing.assert_close(actual.double(), expected, rtol=2e-6, atol=2e-6)


def _on_a_slice(rank, world_size):
    logits, labels = _inputs()
    part = logits.detach()[:, :36].chunk(world_size, -1)[rank].clone().requires_grad_()
    losses, z_losses = flash_attn.cross_entropy_loss(
        part, labels.clamp(max=35), None, 0.1, 0.7, 0.01, process_group=dist.group.WORLD
    )
    losses.sum().backward()
    return losses.detach(), z_losses, part.grad


@pytest.mark.slow
def test_vocabulary_on_two_ranks():
    logits, labels = _inputs()
    exact = logits.detach()[:, :36].double().requires_grad_()
    expected, expected_z = _oracle(exact, labels.clamp(max=35), 0.1, 0.7, 0.01)
    expected.sum().backward()
    results = run_ranks(_on_a_slice, 2)
    for losses, z_losses, _ in results:
        torch.testing.assert_close(losses.double(), expected.detach(), rtol=2e-6, atol=2e-6)
        torch.testing.assert_close(z_losses.double(), expected_z.detach(), rtol=2e-6, atol=2e-6)
    grad = torch.cat([part for *_, part in results], -1)
    torch.testing.assert_close(grad.double(), exact.grad, rtol=1e-5, atol=1e-6)


_SOURCES = {
    "flash_attn": "",
    "flash_attn.bert_padding": """
def unpad_input(hidden_states, attention_mask, unused_mask=None): ...
def pad_input(hidden_states, indices, batch, seqlen): ...
def unpad_input_for_concatenated_sequences(hidden_states, attention_mask_in_length): ...
def index_first_axis(*args, **kwargs): ...
def index_put_first_axis(*args, **kwargs): ...
""",
    "flash_attn.ops": "",
    "flash_attn.ops.triton": "",
    "flash_attn.ops.triton.cross_entropy": """
def cross_entropy_loss(logits, labels, precomputed_lse=None, label_smoothing=0.0, logit_scale=1.0,
    lse_square_scale=0.0, ignore_index=-100, inplace_backward=False, process_group=None): ...
""",
    "flash_attn.losses": "",
    "flash_attn.losses.cross_entropy": """
from flash_attn.ops.triton.cross_entropy import cross_entropy_loss
class CrossEntropyLoss:
    def forward(self, input, target, precomputed_lse=None): ...
""",
}


@pytest.fixture
def package(monkeypatch):
    """A function that makes a package with flash_attn's names and signatures of 2.7 and 2.8."""

    def make():
        for name, source in _SOURCES.items():
            module = ModuleType(name)
            module.__path__ = []
            monkeypatch.setitem(sys.modules, name, module)
            parent, _, last = name.rpartition(".")
            if parent:
                setattr(sys.modules[parent], last, module)
            exec(source, vars(module))
        return sys.modules

    return make


def test_patch_and_unpatch(package):
    modules = package()
    losses, padding = modules["flash_attn.losses.cross_entropy"], modules["flash_attn.bert_padding"]
    theirs = losses.cross_entropy_loss
    with flash_attn.patched():
        assert losses.cross_entropy_loss is flash_attn.cross_entropy_loss
        assert losses.CrossEntropyLoss.forward is flash_attn.CrossEntropyLoss.forward
        assert padding.unpad_input is flash_attn.unpad_input
        rows = padding.index_first_axis(torch.arange(6).view(3, 2), torch.tensor([2, 0]))
        assert rows.tolist() == [[4, 5], [0, 1]]
    assert losses.cross_entropy_loss is theirs
