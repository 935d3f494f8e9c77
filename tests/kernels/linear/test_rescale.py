"""Gradients of linear_policy_loss that the backward rescales in place, or not at all."""

import pytest
import torch

from hybridengine.kernels import linear_policy_loss
from tests.kernels.interpreter import run_interpreted
from tests.kernels.linear.cases import DEVICES, loss_inputs, problem


@pytest.mark.slow
def test_in_the_interpreter():
    pytest.importorskip("triton")
    run_interpreted("linear/interpreted_rescale.py")


@pytest.mark.parametrize("device", DEVICES)
def test_a_retained_graph_gives_every_backward_gradients_of_its_own(device):
    tensors, token_ids, _ = problem(40, 16, 101)
    leaves = [t.to(device).requires_grad_() for t in tensors[:2]]
    arguments = {k: v.to(device) for k, v in loss_inputs(40).items()}
    loss, *_ = linear_policy_loss(*leaves, token_ids.to(device), **arguments)
    first = torch.autograd.grad(loss, leaves, retain_graph=True)
    kept = [grad.clone() for grad in first]
    tripled = torch.autograd.grad(3.0 * loss, leaves, retain_graph=True)
    for grad in (*first, *tripled):
        grad.zero_()
    last = torch.autograd.grad(2.0 * loss, leaves)
    for got, expected in zip(last, kept, strict=True):
        assert torch.equal(got, 2.0 * expected)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("factor", (1.0, 3.0))
def test_the_backward_allocates_no_second_weight_gradient(factor, device):
    """The gradient of the weight is the tensor that the forward computed."""
    tensors, token_ids, _ = problem(40, 16, 101)
    leaves = [t.to(device).requires_grad_() for t in tensors[:2]]
    arguments = {k: v.to(device) for k, v in loss_inputs(40).items()}
    saved = []

    def pack(tensor):
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss, *_ = linear_policy_loss(*leaves, token_ids.to(device), **arguments)
    addresses = {tensor.data_ptr() for tensor in saved if tensor.dim() == 2 and tensor.numel()}
    saved.clear()
    grads = torch.autograd.grad(factor * loss, leaves)
    assert {grad.data_ptr() for grad in grads} == addresses
