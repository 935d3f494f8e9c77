"""The experts of a mixture by `grouped_linear`, registered with transformers as `EXPERTS`.

The tokens of all experts are sorted by expert and multiplied by each expert's weights without
padding. A token's result does not depend on the other tokens, bit for bit on a CPU: not on their
number, nor on the experts that they take. What transformers' interface leaves to a model (layout of
the weights, biases, activation) is read from the module, so there is no code per architecture.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.integrations.moe import ExpertsInterface, grouped_mm_experts_forward

from hybridengine.kernels import grouped_linear
from hybridengine.moe.expert_parallel import EXPERT_GROUP, Rows, TokenExchange, local_experts

EXPERTS = "hybridengine_grouped"
ADAPTERS = "hybridengine_adapters"  # attribute of experts: name of a weight → `GroupedAdapter`


def grouped_experts(
    module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """Return the weighted sum of the experts of every token.

    Experts that transformers has distributed over ranks take transformers' own `grouped_mm`.

    Args:
        module: the experts, as transformers' `use_experts_implementation` describes them.
        hidden_states: [T, H].
        top_k_index: [T, k], integers.
        top_k_weights: [T, k].

    Returns:
        [T, H] of the dtype of hidden_states, with the updates of LoRA adapters. A token's experts
        are added in the order of top_k_index, in the wider dtype of weights and hidden states.
    """
    if getattr(module, "_is_expert_parallel", False):  # transformers 5.17 has no such field
        return grouped_mm_experts_forward(module, hidden_states, top_k_index, top_k_weights)
    (num_tokens, top_k), hidden_size = top_k_index.shape, hidden_states.shape[1]
    expert_ids, order = top_k_index.flatten().sort(stable=True)
    every_expert = torch.arange(module.num_experts + 1, device=order.device)
    cu_counts = torch.searchsorted(expert_ids, every_expert, out_int32=True)
    position = torch.empty_like(order)  # of every (token, k) among the sorted ones
    position[order] = torch.arange(len(order), device=order.device)
    adapters, group = getattr(module, ADAPTERS, {}), getattr(module, EXPERT_GROUP, None)

    def held(name: str) -> Tensor:
        weight = getattr(module, name)
        return weight if group is None else local_experts(weight, group)

    def project(x: Tensor, name: str) -> Tensor:
        weight = held(name)
        weight = weight.transpose(1, 2) if module.is_transposed else weight
        out = grouped_linear(x.to(weight.dtype), weight, cu_counts)
        if name in adapters and (factors := adapters[name].factors()) is not None:
            left, right, scale = factors
            down = grouped_linear(x.to(right.dtype), right, _counts_of(right, cu_counts))
            out = out + grouped_linear(scale * down, left, _counts_of(left, cu_counts))
        if not module.has_bias:
            return out
        # A weight for a column of ones: so its gradient is summed as that of a weight is.
        bias = held(f"{name}_bias").unsqueeze(2)
        return out + grouped_linear(out.new_ones(len(out), 1), bias, cu_counts)

    x = Rows.apply(hidden_states, order // top_k, position, top_k)
    exchange = None if group is None else TokenExchange(cu_counts, group)
    if exchange is not None:
        x, cu_counts = exchange.send(x), exchange.cu_counts
    x = project(x, "gate_up_proj" if module.has_gate else "up_proj")
    x = module._apply_gate(x) if module.has_gate else module.act_fn(x)
    x = project(x, "down_proj")
    if exchange is not None:
        x = exchange.send_back(x)
    x = Rows.apply(x, position, order, 1).view(num_tokens, top_k, hidden_size)
    return (x * top_k_weights.unsqueeze(2)).sum(1).to(hidden_states.dtype)


def _counts_of(factor: Tensor, cu_counts: Tensor) -> Tensor:
    """Return the counts for a factor of an adapter: all rows are one group if it is shared."""
    return cu_counts if len(factor) + 1 == len(cu_counts) else cu_counts[:: len(cu_counts) - 1]


ExpertsInterface.register(EXPERTS, grouped_experts)
