"""LoRA on the experts of a mixture: PEFT's adapters of 3-D parameters, by grouped products.

PEFT wraps experts in one `ParamWrapper` per adapted parameter (`LoraConfig.target_parameters`).
Its forward adds the update to the weights of all experts, and autograd then computes the gradient
of the full sum. Here the tokens of an expert are multiplied by the expert's two factors
(`grouped_experts`). Names, initial values and files stay PEFT's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from peft.tuners.lora.layer import ParamWrapper
from torch import Tensor, nn

from hybridengine.model.extensions import SharedFactors
from hybridengine.moe.experts import ADAPTERS, EXPERTS
from hybridengine.run.errors import ModelError
from hybridengine.sync.adapter import expert_factors

# Which factors all experts of a layer have in common, by the projection they adapt. `outer`: those
# at the width of the hidden states, as vLLM's enable_moe_shared_loras.
_SHARED: dict[SharedFactors, dict[str, tuple[str, ...]]] = {
    "none": {},
    "outer": {"gate_up_proj": ("lora_A",), "up_proj": ("lora_A",), "down_proj": ("lora_B",)},
    "all": dict.fromkeys(("gate_up_proj", "up_proj", "down_proj"), ("lora_A", "lora_B")),
}


class GroupedAdapter(ParamWrapper):
    """A `ParamWrapper` whose update `hybridengine.moe.experts` adds to the products.

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
