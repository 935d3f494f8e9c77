"""Load any Hugging Face causal LM, also with a vision tower, unchanged, as FSDP2 shards.

Every rank builds the model on the meta device and shards it. Rank 0 reads the checkpoint and
broadcasts it parameter by parameter, so the other ranks hold at most one unsharded parameter.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import fsdp
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard
from transformers import (
    AutoModelForSequenceClassification,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedModel,
)

from hybridengine.model.attention import attention_of
from hybridengine.model.collectives import use_direct_collectives
from hybridengine.model.compile import compile_layers
from hybridengine.model.extensions import experts_implementation, mixture_extension
from hybridengine.model.flash_attention import choose_flash_kernel
from hybridengine.model.head import patch_head
from hybridengine.model.lora import columns_of
from hybridengine.model.offload import Offloader
from hybridengine.model.packing_check import check_packing
from hybridengine.model.parameters import is_finite, parameter_shards
from hybridengine.model.rotary import fix_rotary_length
from hybridengine.model.shared.frozen_base import (
    GatheredBase,
    base_parameters,
    fill_base,
    place_base,
)
from hybridengine.model.shared.layered import LayeredWeights
from hybridengine.model.validation import auto_class, check_model
from hybridengine.run.all_ranks import broadcast_value, group_timeout, run_on_rank0
from hybridengine.run.errors import ModelError


def sharding_mesh(device_type: str, world_size: int, fsdp_size: int = -1) -> DeviceMesh:
    """Return a 1-D mesh of all ranks, or an HSDP mesh of replicas of `fsdp_size` ranks each.

    Every replica holds the full model, so all-gathers stay among its ranks, at world_size /
    fsdp_size times the memory; gradients are reduced over all ranks.
    """
    if fsdp_size in (-1, world_size):
        return init_device_mesh(device_type, (world_size,), mesh_dim_names=("shard",))
    return _mesh_2d(device_type, world_size, fsdp_size, ("replica", "shard"))


def _mesh_2d(device_type: str, world_size: int, size: int, names: tuple[str, str]) -> DeviceMesh:
    """Return a mesh of `size` consecutive ranks by all others."""
    ranks, timeout = torch.arange(world_size).view(-1, size), group_timeout()
    groups = [
        dist.new_subgroups_by_enumeration(lists.tolist(), timeout)[0] for lists in (ranks.T, ranks)
    ]
    return DeviceMesh.from_group(groups, device_type, ranks, mesh_dim_names=names)


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
    compile: bool = False,
    cpu_offload: bool = False,
    param_offload: bool = False,
    deterministic: bool = False,
    config_overrides: Mapping[str, Any] = MappingProxyType({}),
    expert_parallel_size: int = 1,
    base_memory: Mapping[str, torch.Tensor] = MappingProxyType({}),
    max_model_len: int | None = None,
) -> PreTrainedModel:
    """Load the model at `path` (folder or hub name) onto `mesh` (`sharding_mesh`); collective.

    Master weights, gradients and logits are float32; the rest runs in `param_dtype`. Attention is
    `hybridengine.model.attention`, so the model takes packed input; on a CPU the experts of a
    mixture are those of the `MixtureExtension`. It is returned in eval mode, that is without
    dropout; `model.train()` turns the configured dropout on.

    Args:
        shard_dim1: names of parameters to shard on dim 1 where the mesh divides it evenly; all
            others are sharded on dim 0.
        gradient_checkpointing: recompute decoder layers in backward. Only these layers are then in
            train mode, which transformers' checkpointing requires.
        reshard_after_forward: free unsharded weights after the forward.
        adapt: modifies the model before it is sharded (`apply_lora`), the same way on every rank.
        forward_prefetch: start the next group's all-gather before this group's forward.
        min_num_params: shard the smallest modules with that many parameters as a group each; 0: a
            group per decoder layer. The remaining parameters (such as embeddings) are the root's.
        value_head: logits are one value per position (a linear head [1, H]); `path` may be a
            sequence classifier.
        use_fused_kernels: compute log-probs from hidden states (`hybridengine.model.head`).
        compile: compile the decoder layers (`hybridengine.model.compile`); not with min_num_params.
        cpu_offload: keep shards and gradients in host memory, where the optimizer then steps.
        param_offload: keep weights in host memory outside `on_device(model)`.
        deterministic: a GPU adds gradients in a fixed order (`choose_flash_kernel`).
        config_overrides: entries of config.json → other values (`check_model`).
        expert_parallel_size: consecutive ranks over which the experts of a mixture are divided, by
            a `MixtureExtension`; a 1-D mesh of all ranks, and no min_num_params.
        base_memory: frozen parameter, by its name without adapters → the tensor, in `param_dtype`,
            that holds it unsharded on every rank, or `LayeredWeights`, which are gathered layer by
            layer (`hybridengine.model.shared.frozen_base`).
        max_model_len: the longest sequence of the run, in tokens (`fix_rotary_length`).

    Raises:
        ModelError: on every rank, also if only rank 0 fails (unreadable or missing weights).
    """
    config = check_model(path, trust_remote_code, config_overrides)
    choose_flash_kernel(torch.device(mesh.device_type), deterministic)

    def read() -> PreTrainedModel:
        check_packing(path, config, trust_remote_code)
        return _read_weights(path, config, trust_remote_code, value_head, config_overrides)

    weights = run_on_rank0(read, f"loading model {path!r}")
    grouped = mesh.device_type == "cpu" or expert_parallel_size > 1
    implementation = experts_implementation() if grouped else None  # None: transformers' choice
    model = _build_model(path, config, trust_remote_code, value_head, implementation)
    if model.can_generate() and not value_head:
        own_settings = weights.generation_config if weights is not None else None
        plain = None if own_settings is None else own_settings.to_dict()
        settings: Any = broadcast_value(plain, dict[str, Any] | None)
        model.generation_config = GenerationConfig.from_dict(settings or {})
    if adapt is not None:
        adapt(model)
        run_on_rank0(functools.partial(adapt, weights), "adapting the model")  # type: ignore[arg-type]
    patch_head(model, use_fused_kernels)
    layer_types = set(model._no_split_modules or ())
    layers = [module for module in model.modules() if type(module).__name__ in layer_types]
    if compile:
        decoder = set(model.get_decoder().modules())
        compile_layers([layer for layer in layers if layer in decoder])
    groups = _modules_of_size(model, min_num_params) if min_num_params else layers
    experts, expert_mesh = _divide_experts(model, mesh, expert_parallel_size)
    base = base_parameters(model, base_memory)
    _shard(
        model,
        groups,
        mesh,
        shard_dim1,
        param_dtype,
        cpu_offload,
        reshard_after_forward,
        experts,
        expert_mesh,
        set(base.values()),
    )
    if forward_prefetch:
        for group, following in pairwise(groups):
            assert isinstance(group, fsdp.FSDPModule) and isinstance(following, fsdp.FSDPModule)
            group.set_modules_to_forward_prefetch([following])
    place_base(model, base, base_memory)
    _load_weights(model, weights, mesh, cpu_offload, base_memory)
    fix_rotary_length(model, max_model_len)
    model.eval()
    if gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        for layer in layers:
            layer.training = True

    def shards() -> list[torch.Tensor]:
        return [x for name, x in parameter_shards(model).items() if name not in base_memory]

    if isinstance(base_memory, LayeredWeights):
        model.gathered_base = GatheredBase(model, layers, base_memory)  # type: ignore[assignment]
    offloader = Offloader(shards, param_offload)
    model.offloader = offloader  # type: ignore[assignment]
    return model


def is_sequence_classifier(config: PretrainedConfig) -> bool:
    """Return whether the checkpoint of `config` has a sequence classification head."""
    return any("SequenceClassification" in name for name in config.architectures or ())


def _read_weights(
    path: str,
    config: PretrainedConfig,
    trust_remote_code: bool,
    value_head: bool,
    overrides: Mapping[str, Any],
) -> PreTrainedModel:
    """Read the full causal LM at `path` in float32, with a value head if `value_head`."""
    classifier = value_head and is_sequence_classifier(config)
    loader = AutoModelForSequenceClassification if classifier else auto_class(config)
    if classifier and config.num_labels != 1:
        raise ModelError(
            f"model {path!r} has {config.num_labels} labels; a reward or value model has one"
        )
    model, report = loader.from_pretrained(
        path,
        dtype=torch.float32,
        trust_remote_code=trust_remote_code,
        output_loading_info=True,
        **overrides,
    )
    if classifier:
        _move_score_to_output_head(model, trust_remote_code)
    elif value_head:
        _set_value_head(model)
    parameters = dict(model.named_parameters())
    if missing := sorted(parameters.keys() & set(report["missing_keys"])):
        raise ModelError(
            f"the checkpoint {path!r} lacks {len(missing)} weights of {type(model).__name__}, "
            f"such as {missing[0]!r}; use a complete checkpoint"
        )
    if bad := next((name for name, x in parameters.items() if not is_finite(x)), None):
        raise ModelError(
            f"{bad} contains NaN or infinity: the file is damaged, or the run that wrote it had "
            "diverged"
        )
    return model


def _build_model(
    path: str,
    config: PretrainedConfig,
    trust_remote_code: bool,
    value_head: bool,
    experts: str | None,
) -> PreTrainedModel:
    """Build the model on the meta device; `experts` names the implementation of a mixture's."""
    with torch.device("meta"):
        model = auto_class(config).from_config(
            config,
            dtype=torch.float32,
            attn_implementation=attention_of(config),
            experts_implementation=experts,
            trust_remote_code=trust_remote_code,
        )
    if not model._supports_attention_backend:
        raise ModelError(f"model {path!r} ({type(model).__name__}) cannot run packed")
    if value_head:
        _set_value_head(model)
    return model


def _modules_of_size(model: PreTrainedModel, min_num_params: int) -> list[nn.Module]:
    """Return the smallest modules with `min_num_params` parameters, not counting nested groups."""
    embeddings = {model.get_input_embeddings(), model.get_output_embeddings()}  # may be tied
    chosen: set[nn.Module] = set()

    def visit(module: nn.Module) -> int:
        """Return the number of parameters of `module` that are in no group yet."""
        num_params = sum(p.numel() for p in module.parameters(recurse=False))
        num_params += sum(visit(child) for child in module.children())
        is_called = not isinstance(module, nn.ModuleList | nn.ModuleDict)  # FSDP2 hooks forward
        if num_params < min_num_params or not is_called or embeddings & set(module.modules()):
            return num_params
        chosen.add(module)
        return 0

    visit(model)
    return [module for module in model.modules() if module in chosen]


def _set_value_head(model: PreTrainedModel) -> None:
    """Replace the output head of a causal LM by a zero Linear(H, 1) on the same device."""
    old = model.get_output_embeddings()
    weight = None if old is None else getattr(old, "weight", None)
    if weight is None:
        raise ModelError(f"{type(model).__name__} has no output head to replace by a value head")
    head = nn.Linear(weight.shape[1], 1, bias=False, dtype=weight.dtype, device=weight.device)
    nn.init.zeros_(head.weight)
    model.set_output_embeddings(head)
    for config in {id(c): c for c in (model.config, model.config.get_text_config())}.values():
        config.tie_word_embeddings = False
        if getattr(config, "final_logit_softcapping", None):  # for logits, not for values
            config.final_logit_softcapping = None


def _move_score_to_output_head(model: PreTrainedModel, trust_remote_code: bool = False) -> None:
    """Move the `score` head of a sequence classifier to where its causal LM has the output head."""
    loader = auto_class(model.config)
    with torch.device("meta"):
        causal = loader.from_config(model.config, trust_remote_code=trust_remote_code)
    head = causal.get_output_embeddings()
    name = next(n for n, module in causal.named_modules() if module is head)
    model.set_submodule(name, model.get_submodule("score"))
    del model.score


def _divide_experts(
    model: nn.Module, mesh: DeviceMesh, size: int
) -> tuple[list[nn.Module], DeviceMesh | None]:
    """Divide the experts of a mixture over `size` consecutive ranks each.

    Returns their modules, and the mesh of the ranks that hold the same experts.
    """
    if size == 1:
        return [], None
    mixture = mixture_extension("actor.fsdp_config.expert_parallel_size")
    divided = _mesh_2d(mesh.device_type, mesh.size(), size, mixture.mesh_dims)
    divided._flatten()  # so that DTensor reduces a norm over both dimensions at once
    return mixture.distribute(model, divided), divided[mixture.mesh_dims[0]]


def _shard(
    model: nn.Module,
    groups: Sequence[nn.Module],
    mesh: DeviceMesh,
    shard_dim1: Callable[[str], bool],
    param_dtype: torch.dtype,
    cpu_offload: bool,
    reshard_after_forward: bool,
    experts: Sequence[nn.Module],
    expert_mesh: DeviceMesh | None,
    ignored: set[nn.Parameter],
) -> None:
    """Apply FSDP2 to each of `groups` and to the rest of `model`, in place.

    experts: modules that are divided over ranks; each part is sharded over `expert_mesh`.
    ignored: parameters that are not sharded.
    """
    names = {id(p): columns_of(name) for name, p in model.named_parameters()}
    shard_size = mesh.size(mesh.ndim - 1)

    def placement(param: nn.Parameter) -> Shard | None:
        divides = param.ndim > 1 and param.shape[1] % shard_size == 0
        return Shard(1) if divides and shard_dim1(names[id(param)]) else None

    pinned = torch.cuda.is_available()
    options: dict[str, Any] = {
        "mesh": mesh,
        "mp_policy": fsdp.MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=torch.float32),
        "shard_placement_fn": placement,
        "offload_policy": fsdp.CPUOffloadPolicy(pin_memory=pinned)
        if cpu_offload
        else fsdp.OffloadPolicy(),
        "ignored_params": ignored,
    }
    for module in experts:  # FSDP2 requires inner modules first
        own = {"mesh": expert_mesh, "shard_placement_fn": lambda param: Shard(1)}
        fsdp.fully_shard(module, reshard_after_forward=reshard_after_forward, **options | own)
    for group in reversed(groups):
        fsdp.fully_shard(group, reshard_after_forward=reshard_after_forward, **options)
    # FSDP2 does not reshard the root after forward: backward begins with its parameters.
    fsdp.fully_shard(model, **options)
    if mesh.device_type == "cpu":
        for module in (*experts, *groups, model):
            assert isinstance(module, fsdp.FSDPModule)
            use_direct_collectives(module)


def _load_weights(
    model: nn.Module,
    weights: nn.Module | None,
    mesh: DeviceMesh,
    cpu_offload: bool,
    base_memory: Mapping[str, torch.Tensor],
) -> None:
    """Materialize the sharded meta `model` from `weights`, the full model on rank 0."""
    device = torch.device(mesh.device_type)
    home = torch.device("cpu") if cpu_offload else device
    # As `to_empty`, which would also replace the memory of the base.
    model._apply(lambda x: torch.empty_like(x, device=home) if x.device.type == "meta" else x)
    fill_base(base_memory, weights)
    own_state = {} if weights is None else weights.state_dict(keep_vars=True)
    in_base = (
        set() if weights is None else {*map(id, base_parameters(weights, base_memory).values())}
    )
    set_model_state_dict(
        model,
        {name: x.detach() for name, x in own_state.items() if id(x) not in in_base},
        options=StateDictOptions(
            full_state_dict=True, broadcast_from_rank0=True, strict=not base_memory
        ),
    )
    # Computed buffers (rotary frequencies) are not in the state dict. Buffers are not offloaded.
    own = None if weights is None else dict(weights.named_buffers())
    buffers = broadcast_value(own, dict[str, torch.Tensor])
    for name, buffer in buffers.items():
        owner, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(owner), attribute, buffer.to(device))
    dist.barrier()
