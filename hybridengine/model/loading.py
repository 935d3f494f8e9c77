"""Any Hugging Face causal LM, unchanged, sharded by FSDP2 from one reader.

Every rank builds the model on the meta device and shards it; rank 0 reads the checkpoint and
scatters it parameter by parameter, so no other rank holds more than one whole parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel

from hybridengine.errors import ModelError
from hybridengine.model.attention import ATTENTION
from hybridengine.model.checking import check_model
from hybridengine.model.head import prepare_head
from hybridengine.model.lora import columns_of
from hybridengine.model.offload import Parking
from hybridengine.model.parameters import is_finite, parameter_shards
from hybridengine.model.value import put_value_head, read_model
from hybridengine.runtime.rank_zero import broadcast_from_rank0, run_on_rank0

__all__ = ["load_causal_lm", "sharding_mesh"]


def sharding_mesh(device_type: str, world_size: int, fsdp_size: int = -1) -> DeviceMesh:
    """All ranks as one row of shards, or as replicas of `fsdp_size` neighbouring ranks each (HSDP).

    Every replica holds the whole model, so its all-gathers stay among its ranks, at world_size /
    fsdp_size times the memory; gradients are reduced over all ranks.
    """
    if fsdp_size in (-1, world_size):
        return init_device_mesh(device_type, (world_size,), mesh_dim_names=("shard",))
    shape = (world_size // fsdp_size, fsdp_size)
    return init_device_mesh(device_type, shape, mesh_dim_names=("replica", "shard"))


def load_causal_lm(
    path: str,
    *,
    mesh: DeviceMesh,
    shard_dim1: Callable[[str], bool],
    param_dtype: torch.dtype = torch.bfloat16,
    gradient_checkpointing: bool = False,
    trust_remote_code: bool = False,
    reshard_after_forward: bool = True,
    adapt: Callable[[PreTrainedModel], object] | None = None,
    forward_prefetch: bool = False,
    min_num_params: int = 0,
    value_head: bool = False,
    use_fused_kernels: bool = True,
    cpu_offload: bool = False,
    param_offload: bool = False,
) -> PreTrainedModel:
    """The model at `path` (folder or hub name) on `mesh` (`sharding_mesh`); all ranks call.

    Masters, gradients and logits are float32, the rest runs in `param_dtype`. A parameter whose
    name `shard_dim1` accepts is sharded on dim 1 where the mesh divides it evenly, all others on
    dim 0. Attention is `hybridengine.model.attention`, so the model takes packed input.

    A decoder layer is gathered at once or, with `min_num_params`, the smallest modules that have so
    many parameters; what remains (the embeddings among it) belongs to the root. It is sharded again
    after its forward, unless `reshard_after_forward` is off. With `forward_prefetch` the next one
    is gathered before this one's forward, not after. With `cpu_offload` the shards and their
    gradients live in host memory, and an optimizer steps there.

    With `use_fused_kernels` log-probs come straight from hidden states (`hybridengine.model.head`).
    With `value_head` its logits are one value per position, see `hybridengine.model.value`; `path`
    may then be a sequence classifier.

    With `param_offload` its weights are on their device inside `on_device(model)` only.

    adapt: changes the model before it is sharded (`apply_lora`), the same way on every rank.

    The model comes in eval mode, that is without dropout; only its checkpointed layers are in train
    mode, which is what turns checkpointing on. `model.train()` adds the configured dropout.

    Raises:
        ModelError: on every rank, also for what only rank 0 sees (unreadable or missing weights).
    """
    config = check_model(path, trust_remote_code)
    doing = f"loading model {path!r}"
    weights = run_on_rank0(lambda: read_model(path, config, trust_remote_code, value_head), doing)
    run_on_rank0(lambda: _check_finite(weights), doing)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            config,
            dtype=torch.float32,
            attn_implementation=ATTENTION,
            trust_remote_code=trust_remote_code,
        )
    if model._is_stateful or not model._supports_attention_backend:
        raise ModelError(f"model {path!r} ({type(model).__name__}) cannot run packed")
    if value_head:
        put_value_head(model)
    elif model.can_generate():
        settings = weights.generation_config if weights is not None else None
        model.generation_config = broadcast_from_rank0(settings) or GenerationConfig()
    if adapt is not None:
        adapt(model)
        run_on_rank0(lambda: adapt(weights), "adapting the model")
    prepare_head(model, use_fused_kernels)
    layers = _decoder_layers(model)
    groups = _modules_of_size(model, min_num_params) if min_num_params else layers
    options = _fsdp_options(model, mesh, shard_dim1, param_dtype, cpu_offload)
    for group in reversed(groups):  # FSDP2 wants the inner of nested modules first
        fully_shard(group, reshard_after_forward=reshard_after_forward, **options)
    # The root's own parameters are needed again as soon as backward begins: FSDP2's default.
    fully_shard(model, **options)
    if forward_prefetch:
        for group, following in pairwise(groups):
            group.set_modules_to_forward_prefetch([following])
    _fill(model, weights, mesh, cpu_offload)
    model.eval()
    if gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        for layer in layers:
            layer.training = True
    model.parking = Parking(lambda: parameter_shards(model).values(), param_offload)
    return model


def _check_finite(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if not is_finite(parameter):
            raise ModelError(
                f"{name} holds values that are not finite (NaN or infinity): the file is damaged, "
                "or the run that wrote it had diverged"
            )


def _decoder_layers(model: PreTrainedModel) -> list[nn.Module]:
    names = set(model._no_split_modules or ())
    return [module for module in model.modules() if type(module).__name__ in names]


def _modules_of_size(model: PreTrainedModel, min_num_params: int) -> list[nn.Module]:
    """The smallest modules with `min_num_params` parameters outside of those inside them."""
    embeddings = {model.get_input_embeddings(), model.get_output_embeddings()}  # may be tied
    chosen: set[nn.Module] = set()

    def visit(module: nn.Module) -> int:
        """Parameters of `module` that are in no group yet."""
        left = sum(p.numel() for p in module.parameters(recurse=False))
        left += sum(visit(child) for child in module.children())
        runs = not isinstance(module, nn.ModuleList | nn.ModuleDict)  # else FSDP2 has no hook
        if left < min_num_params or not runs or embeddings & set(module.modules()):
            return left
        chosen.add(module)
        return 0

    visit(model)
    return [module for module in model.modules() if module in chosen]


def _fsdp_options(
    model: nn.Module,
    mesh: DeviceMesh,
    shard_dim1: Callable[[str], bool],
    param_dtype: torch.dtype,
    cpu_offload: bool,
) -> dict[str, Any]:
    """What `fully_shard` is told about every group of parameters alike."""
    names = {id(p): columns_of(name) for name, p in model.named_parameters()}
    shard_size = mesh.size(mesh.ndim - 1)

    def placement(param: nn.Parameter) -> Shard | None:
        divides = param.ndim > 1 and param.shape[1] % shard_size == 0
        return Shard(1) if divides and shard_dim1(names[id(param)]) else None

    pinned = torch.cuda.is_available()
    return {
        "mesh": mesh,
        "mp_policy": MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=torch.float32),
        "shard_placement_fn": placement,
        "offload_policy": CPUOffloadPolicy(pin_memory=pinned) if cpu_offload else OffloadPolicy(),
    }


def _fill(model: nn.Module, weights: nn.Module | None, mesh: DeviceMesh, cpu_offload: bool) -> None:
    """Give the meta model its shards and buffers; `weights` is the whole model on rank 0."""
    device = torch.device(mesh.device_type)
    whole = None if weights is None else dict(weights.named_parameters())
    for name, param in list(model.named_parameters()):
        assert isinstance(param, DTensor)
        if whole is None:
            source = torch.empty(param.shape, dtype=param.dtype, device=device)
        else:
            source = whole[name].detach()
            whole[name].data = torch.empty(0)  # rank 0 lets go of what it has handed out
        filled = distribute_tensor(source, mesh, param.placements)
        filled = filled.cpu() if cpu_offload else filled
        filled = nn.Parameter(filled, requires_grad=param.requires_grad)
        torch.utils.swap_tensors(param, filled)  # wherever it is held: weights may be tied
    # Buffers that are computed, not stored (rotary frequencies), are real on rank 0 only.
    buffers = broadcast_from_rank0(None if weights is None else dict(weights.named_buffers()))
    assert buffers is not None
    # `to` lets FSDP2 take note of the new parameters; where those are offloaded, buffers are not.
    home = torch.device("cpu") if cpu_offload else device
    _put_buffers(model, buffers, home)
    model.to(home)
    _put_buffers(model, buffers, device)
    dist.barrier()


def _put_buffers(
    model: nn.Module, buffers: Mapping[str, torch.Tensor], device: torch.device
) -> None:
    for name, buffer in buffers.items():
        owner, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(owner), attribute, buffer.to(device))
