"""The experts of a mixture by `grouped_linear`, registered with transformers as `EXPERTS`.

The tokens of all experts are sorted by expert and multiplied by each expert's weights without
padding. A token's result does not depend on the other tokens, bit for bit on a CPU: not on their
number, nor on the experts that they take. What transformers' interface leaves to a model (layout of
the weights, biases, activation) is read from the module, so there is no code per architecture.

LoRA on experts: PEFT wraps them in one `ParamWrapper` per adapted parameter
(`LoraConfig.target_parameters`). Its forward adds the update to the weights of all experts, and
autograd then computes the gradient of the full sum. Here the tokens of an expert are multiplied by
the expert's two factors. Names, initial values and files stay PEFT's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any, NamedTuple

import torch
from peft.tuners.lora.layer import ParamWrapper
from torch import Tensor, nn
from transformers.integrations.moe import ExpertsInterface, grouped_mm_experts_forward

from hybridengine.kernels import gated_activation, grouped_linear
from hybridengine.kernels.decode_linear import join_parts
from hybridengine.model.extensions import SharedFactors
from hybridengine.moe.adapters import expert_factors
from hybridengine.moe.expert_parallel import EXPERT_GROUP, Rows, TokenExchange, local_experts
from hybridengine.run.errors import ModelError

EXPERTS = "hybridengine_grouped"
ADAPTERS = "hybridengine_adapters"  # attribute of experts: name of a weight → `GroupedAdapter`

Gather = Callable[[Tensor], Tensor]


class HeldExperts(NamedTuple):
    """The experts that a rank of an engine has whole; each rank has as many.

    ids: of these experts.
    gather: collects tensors of equal shape of all ranks, stacked.
    """

    ids: range
    gather: Gather

    def rows(self, cu_counts: Tensor) -> tuple[slice, Tensor]:
        """Return the rows of these experts among those sorted by expert, and their cu_counts."""
        own = cu_counts[self.ids.start : self.ids.stop + 1]
        return slice(int(own[0]), int(own[-1])), own - own[0]

    def collect(self, x: Tensor, rows: slice, expert_ids: Tensor) -> Tensor:
        """Return the rows of all experts; x: those of `rows`, the others are other ranks'."""
        padded = x.new_zeros(len(expert_ids), x.shape[1])
        padded[rows] = x
        return self.gather(padded)[expert_ids // len(self.ids), torch.arange(len(expert_ids))]


class ExactExperts(NamedTuple):
    """How experts are computed so that an engine of any tensor-parallel size has the same bits.

    activation: of `gated_activation`, which is that of the experts; None: their own.
    splits: into how many slices of their width an engine divides the experts. The slices' sums over
      the experts of a token are added in their order, in the wider dtype.
    gather: in such an engine, collects the sums [T, H] of all ranks as [ranks, T, H].
    held: in an engine whose ranks divide the experts themselves, those of this rank.
    """

    activation: Any = None
    splits: int = 1
    gather: Gather | None = None
    held: HeldExperts | None = None


_INEXACT = ExactExperts()


def grouped_experts(
    module: Any,
    hidden_states: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    exact: ExactExperts = _INEXACT,
) -> Tensor:
    """Return the weighted sum of the experts of every token.

    Experts that transformers has distributed over ranks take transformers' own `grouped_mm`.

    Args:
        module: the experts, as transformers' `use_experts_implementation` describes them.
        hidden_states: [T, H].
        top_k_index: [T, k], integers.
        top_k_weights: [T, k].
        exact: how, where an engine computes the same bits; without adapters.

    Returns:
        [T, H] of the dtype of hidden_states, with the updates of LoRA adapters. A token's experts
        are added in the order of top_k_index, in the wider dtype of weights and hidden states.
    """
    if getattr(module, "_is_expert_parallel", False):  # transformers 5.17 has no such field
        return grouped_mm_experts_forward(module, hidden_states, top_k_index, top_k_weights)
    num_tokens, top_k = top_k_index.shape
    activation, splits, gather, held_experts = exact
    expert_ids, order = top_k_index.flatten().sort(stable=True)
    every_expert = torch.arange(module.num_experts + 1, device=order.device)
    cu_counts = torch.searchsorted(expert_ids, every_expert, out_int32=True)
    position = torch.empty_like(order)  # of every (token, k) among the sorted ones
    position[order] = torch.arange(len(order), device=order.device)
    adapters, group = getattr(module, ADAPTERS, {}), getattr(module, EXPERT_GROUP, None)

    def held(name: str) -> Tensor:
        weight = getattr(module, name)
        return weight if group is None else local_experts(weight, group)

    def project(x: Tensor, name: str, splits: int = 1) -> Tensor:
        weight = held(name)
        weight = weight.transpose(1, 2) if module.is_transposed else weight
        slices = zip(x.to(weight.dtype).chunk(splits, 1), weight.chunk(splits, 2), strict=True)
        out = _joined([grouped_linear(*part, cu_counts) for part in slices])
        if name in adapters and (factors := adapters[name].factors()) is not None:
            left, right, scale = factors
            down = grouped_linear(x.to(right.dtype), right, _counts_of(right, cu_counts))
            out = out + grouped_linear(scale * down, left, _counts_of(left, cu_counts))
        if not module.has_bias:
            return out
        # A weight for a column of ones: so its gradient is summed as that of a weight is.
        bias = held(f"{name}_bias").unsqueeze(2)
        if splits > 1:  # it is the first engine rank's
            bias = torch.cat(
                [bias, bias.new_zeros(bias.shape[0], out.shape[1] - bias.shape[1], 1)], 1
            )
        return out + grouped_linear(out.new_ones(len(out), 1), bias, cu_counts)

    x = Rows.apply(hidden_states, order // top_k, position, top_k)
    exchange = None if group is None else TokenExchange(cu_counts, group)
    if exchange is not None:
        x, cu_counts = exchange.send(x), exchange.cu_counts
    if held_experts is not None:
        rows, cu_counts = held_experts.rows(cu_counts)
        x = x[rows]
    x = project(x, "gate_up_proj" if module.has_gate else "up_proj")
    if activation is not None:
        gate, up = x.chunk(2, 1)
        x = gated_activation(gate, up, activation)
    else:
        x = module._apply_gate(x) if module.has_gate else module.act_fn(x)
    x = project(x, "down_proj", splits)
    if exchange is not None:
        x = exchange.send_back(x)
    if held_experts is not None:
        x = held_experts.collect(x, rows, expert_ids)
    x = Rows.apply(x, position, order, 1).view(num_tokens, top_k, -1)
    # In order of top_k_index; a sum of torch's over a dimension has another order at its end.
    pairs = zip(x.unbind(1), top_k_weights.unsqueeze(2).unbind(1), strict=True)
    total = reduce(torch.add, (one * weight for one, weight in pairs))
    parts = total.chunk(splits, 1) if gather is None else gather(total).unbind(0)
    return join_parts(parts, None, hidden_states.dtype)


def _joined(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, 1)


def _counts_of(factor: Tensor, cu_counts: Tensor) -> Tensor:
    """Return the counts for a factor of an adapter: all rows are one group if it is shared."""
    return cu_counts if len(factor) + 1 == len(cu_counts) else cu_counts[:: len(cu_counts) - 1]


ExpertsInterface.register(EXPERTS, grouped_experts)

# Which factors all experts of a layer have in common, by the projection they adapt. `outer`: those
# at the width of the hidden states, as vLLM's enable_moe_shared_loras.
_SHARED: dict[SharedFactors, dict[str, tuple[str, ...]]] = {
    "none": {},
    "outer": {"gate_up_proj": ("lora_A",), "up_proj": ("lora_A",), "down_proj": ("lora_B",)},
    "all": dict.fromkeys(("gate_up_proj", "up_proj", "down_proj"), ("lora_A", "lora_B")),
}


class GroupedAdapter(ParamWrapper):
    """A `ParamWrapper` whose update `grouped_experts` adds to the products.

    Any other implementation of the experts gets PEFT's own forward.
    """

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        experts: Any = self.get_base_layer()
        is_distributed = getattr(experts, "_is_expert_parallel", False)
        if experts.config._experts_implementation == EXPERTS and not is_distributed:
            return self.base_layer(x, *args, **kwargs)
        return super().forward(x, *args, **kwargs)

    def factors(self) -> tuple[Tensor, Tensor, float] | None:
        """Return B [E, out, r], A [E, r, in] and the scale; None if the adapter is disabled.

        A factor of all experts has 1 in place of E.
        """
        if self.disable_adapters or self.merged:
            return None
        (key,) = self.active_adapters
        return *self._factors_of(key), self.scaling[key]

    def _factors_of(self, key: str) -> tuple[Tensor, Tensor]:
        left, right = (getattr(self, part)[key].weight for part in ("lora_B", "lora_A"))
        return expert_factors(left, right, self.r[key])

    def get_delta_factors(self, adapter_name: str) -> tuple[Tensor, Tensor, float]:
        """Return what PEFT's forward multiplies, of shared factors too."""
        left, right = self._factors_of(adapter_name)
        if self.get_base_layer().is_transposed:
            left, right = right.transpose(1, 2), left.transpose(1, 2)
        dtype = self.get_param().dtype
        left, right = (f.expand(self.num_experts, -1, -1).to(dtype) for f in (left, right))
        return left, right, self.scaling[adapter_name]


def check_targets(model: nn.Module, target_parameters: Sequence[str]) -> None:
    """Raise ModelError for a name that is no weight of experts which `GroupedAdapter` adapts."""
    names = [name for name, _ in model.named_parameters()]
    for target in target_parameters:
        matches = [name for name in names if f".{name}".endswith(f".{target}")]
        for name in matches or [""]:
            owner, _, weight = name.rpartition(".")
            experts = model.get_submodule(owner)
            if weight not in _SHARED["all"] or not hasattr(experts, "is_transposed"):
                raise ModelError(
                    f"target_parameters: got {target!r}, which names {name or 'nothing'} in "
                    f"{type(model).__name__}, expected weights of experts that transformers' "
                    "experts interface runs, such as experts.gate_up_proj and experts.down_proj; "
                    "linear layers belong in target_modules"
                )


def use_grouped_adapters(model: Any, shared: SharedFactors) -> None:
    """Make PEFT's wrappers of experts in `model` grouped, with `shared` factors; in place."""
    for wrapper in model.modules():
        if type(wrapper) is not ParamWrapper:
            continue
        wrapper.__class__ = GroupedAdapter
        experts = wrapper.get_base_layer()
        experts.__dict__.setdefault(ADAPTERS, {})[wrapper.parameter_name] = wrapper
        for part in _SHARED[shared].get(wrapper.parameter_name, ()):
            _share(wrapper, part)
    model.set_experts_implementation(EXPERTS)


def _share(wrapper: ParamWrapper, part: str) -> None:
    """Give all experts the same factor `part`: that of the first one."""
    (key,) = wrapper.active_adapters
    layer, rank = getattr(wrapper, part)[key], wrapper.r[key]
    if part == "lora_A":
        weight, layer.out_features = layer.weight[:rank], rank
    else:
        weight, layer.in_features = layer.weight[:, :: wrapper.num_experts], rank
    layer.weight = nn.Parameter(weight.detach().clone())
