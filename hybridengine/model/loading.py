"""Load any Hugging Face causal LM, also with a vision tower, unchanged, as FSDP2 shards.

Every rank builds the model on the meta device and shards it. Rank 0 reads the checkpoint and
broadcasts it parameter by parameter, so the other ranks hold at most one unsharded parameter.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import (
    AutoModelForSequenceClassification,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedModel,
)

from hybridengine.model.attention import attention_of
from hybridengine.model.extensions import (
    experts_implementation,
    mixture_extension,
    prepare_model,
)
from hybridengine.model.flash_attention import choose_flash_kernel
from hybridengine.model.fsdp import Offloader, mesh_2d, modules_of_size, shard_model
from hybridengine.model.head import patch_head
from hybridengine.model.packing_check import check_packing
from hybridengine.model.parameters import is_finite, parameter_shards
from hybridengine.model.replica import Replica
from hybridengine.model.rotary import fix_rotary_length
from hybridengine.model.shared_parameters import (
    GatheredBase,
    base_parameters,
    fill_base,
    place_base,
)
from hybridengine.model.shared_weights import LayeredWeights
from hybridengine.model.validation import config_of, meta_model, read_pretrained
from hybridengine.run import load_plugin
from hybridengine.run.config.common import ShardingConfig, TrainedModelConfig
from hybridengine.run.errors import ModelError
from hybridengine.run.messages import broadcast_value, run_on_rank0


@dataclass(frozen=True)
class LoadOptions:
    """How a model is read, changed and sharded; `sharding.dtype` is not auto.

    Args:
        model: `path` is a folder or a hub name; adapters are left to `adapt`.
        sharding: weights, gradients and the optimizer's state. Experts are divided by a
            `MixtureExtension`, over a 1-D mesh of all ranks and with no min_num_params.
        shard_dim1: names of parameters to shard on dim 1 where the mesh divides it evenly; all
            others are sharded on dim 0.
        adapt: modifies the model before it is sharded (`apply_lora`), the same way on every rank.
        value_head: logits are one value per position (a linear head [1, H]); the model may be a
            sequence classifier.
        deterministic: a GPU adds gradients in a fixed order (`choose_flash_kernel`).
        base_memory: frozen parameter, by its name without adapters → the tensor, in the compute
            type, that holds it unsharded on every rank, or `LayeredWeights`, which are gathered
            layer by layer (`hybridengine.model.shared_parameters`).
        max_model_len: the longest sequence of the run, in tokens (`fix_rotary_length`).
    """

    model: TrainedModelConfig
    sharding: ShardingConfig
    shard_dim1: Callable[[str], bool] = lambda name: False
    adapt: Callable[[PreTrainedModel], object] | None = None
    value_head: bool = False
    deterministic: bool = False
    base_memory: Mapping[str, Tensor] = field(default_factory=dict)
    max_model_len: int | None = None


def load_causal_lm(options: LoadOptions, mesh: DeviceMesh) -> PreTrainedModel:
    """Load the model of `options` onto `mesh` (`sharding_mesh`); collective.

    Master weights, gradients and logits are float32; the rest runs in `sharding.dtype`. Attention
    is `hybridengine.model.attention`, so the model takes packed input; on a CPU the experts of a
    mixture are those of the `MixtureExtension`. It is returned in eval mode, that is without
    dropout; `model.train()` turns the configured dropout on. With gradient checkpointing, only
    the decoder layers are in train mode, which transformers' checkpointing requires.

    Raises:
        ModelError: on every rank, also if only rank 0 fails (unreadable or missing weights).
    """
    path, trust = options.model.path, options.model.trust_remote_code
    adapt, sharding, base_memory = options.adapt, options.sharding, options.base_memory
    config = config_of(options.model)
    choose_flash_kernel(torch.device(mesh.device_type), options.deterministic)

    def read() -> PreTrainedModel:
        check_packing(path, config, trust)
        return _read_weights(options, config)

    weights = run_on_rank0(read, f"loading model {path!r}")
    grouped = mesh.device_type == "cpu" or sharding.expert_parallel_size > 1
    implementation = experts_implementation() if grouped else None  # None: transformers' choice
    model: PreTrainedModel = meta_model(
        config,
        trust,
        dtype=torch.float32,
        attn_implementation=attention_of(config),
        experts_implementation=implementation,
    )
    prepare_model(model)
    if options.value_head:
        _set_value_head(model)
    elif model.can_generate():
        own_settings = weights.generation_config if weights is not None else None
        plain = None if own_settings is None else own_settings.to_dict()
        settings: Any = broadcast_value(plain, dict[str, Any] | None)
        model.generation_config = GenerationConfig.from_dict(settings or {})
    if adapt is not None:
        adapt(model)
        run_on_rank0(functools.partial(adapt, weights), "adapting the model")  # type: ignore[arg-type]
    patch_head(model, options.model.use_fused_kernels)
    layer_types = set(model._no_split_modules or ())
    layers = [module for module in model.modules() if type(module).__name__ in layer_types]
    if options.model.compile or options.model.cuda_graphs:
        decoder = set(model.get_decoder().modules())
        compiler = load_plugin("compilers", "torch", "model.compile or model.cuda_graphs")
        compiler.apply(options.model, model, [layer for layer in layers if layer in decoder])
    min_num_params = sharding.wrap_policy.min_num_params
    groups = modules_of_size(model, min_num_params) if min_num_params else layers
    experts, expert_mesh = _divide_experts(model, mesh, sharding.expert_parallel_size)
    base = base_parameters(model, base_memory)
    if needs_fsdp(mesh, sharding):
        load = shard_model(
            model,
            groups,
            mesh,
            sharding,
            shard_dim1=options.shard_dim1,
            ignored=set(base.values()),
            experts=experts,
            expert_mesh=expert_mesh,
        )
        copies: Callable[[], list[Tensor]] = list
    else:
        replica = Replica(model, groups, mesh, getattr(torch, sharding.dtype))
        load, copies = replica.load, replica.owned
    place_base(model, base, base_memory)
    _load_weights(model, weights, torch.device(mesh.device_type), base_memory, load)
    fix_rotary_length(model, options.max_model_len)
    model.eval()
    if options.model.enable_gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        for layer in layers:
            layer.training = True

    def on_device() -> list[Tensor]:
        shards = parameter_shards(model)
        return [x for name, x in shards.items() if name not in base_memory] + copies()

    if isinstance(base_memory, LayeredWeights):
        model.gathered_base = GatheredBase(model, layers, base_memory)  # type: ignore[assignment]
    model.offloader = Offloader(on_device, sharding.param_offload)  # type: ignore[assignment]
    return model


def needs_fsdp(mesh: DeviceMesh, sharding: ShardingConfig) -> bool:
    """Return whether ranks share a copy of the model, or FSDP2 streams it from host memory."""
    return mesh.size(mesh.ndim - 1) > 1 or sharding.offload_policy


def is_sequence_classifier(config: PretrainedConfig) -> bool:
    """Return whether the checkpoint of `config` has a sequence classification head."""
    return any("SequenceClassification" in name for name in config.architectures or ())


def _read_weights(options: LoadOptions, config: PretrainedConfig) -> PreTrainedModel:
    """Read the full causal LM in float32, with its value head if it has one."""
    path, trust = options.model.path, options.model.trust_remote_code
    classifier = options.value_head and is_sequence_classifier(config)
    loader = AutoModelForSequenceClassification if classifier else None
    if classifier and config.num_labels != 1:
        raise ModelError(
            f"model {path!r} has {config.num_labels} labels; a reward or value model has one"
        )
    model, report = read_pretrained(
        path, config, trust, loader, dtype=torch.float32, output_loading_info=True
    )
    if classifier:
        _move_score_to_output_head(model, trust)
    elif options.value_head:
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
    causal = meta_model(model.config, trust_remote_code)
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
    divided = mesh_2d(mesh.device_type, mesh.size(), size, mixture.mesh_dims)
    divided._flatten()  # so that DTensor reduces a norm over both dimensions at once
    return mixture.distribute(model, divided), divided[mixture.mesh_dims[0]]


def _load_weights(
    model: nn.Module,
    weights: nn.Module | None,
    device: torch.device,
    base_memory: Mapping[str, Tensor],
    load: Callable[[Mapping[str, Tensor]], None],
) -> None:
    """Materialize the meta `model` from `weights`, the full model on rank 0."""
    base = {} if weights is None else base_parameters(weights, base_memory)
    fill_base(base_memory, base)
    in_base = {*map(id, base.values())}
    state = {} if weights is None else weights.state_dict(keep_vars=True)
    load({name: x for name, x in state.items() if id(x) not in in_base})
    # Computed buffers (rotary frequencies) are not in the state dict. Buffers are not offloaded.
    own = None if weights is None else dict(weights.named_buffers())
    buffers = broadcast_value(own, dict[str, Tensor])
    for name, buffer in buffers.items():
        owner, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(owner), attribute, buffer.to(device))
    dist.barrier()
