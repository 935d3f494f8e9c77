"""The arguments of `vllm.LLM`, and which of them `rollout.engine_kwargs.vllm` may have.

Every argument of vLLM 0.32 is in one of the tables. One that is in none, as of another version, is
refused: what it does to weights and log-probs is not known.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import fields
from importlib.metadata import entry_points
from typing import Any

import torch

from hybridengine.engine.interface import EngineOptions
from hybridengine.engine.vllm.environment import CPU_BLOCK_SIZE, prepare_environment
from hybridengine.engine.vllm.quantized import quantization_options
from hybridengine.run.errors import ConfigError

# Memory, speed, scheduling, caches, logs: responses and log-probs are those of the same model.
_ALLOWED = """
    additional_config all2all_backend async_scheduling attention_backend attention_config
    block_size compilation_config cudagraph_capture_sizes cudagraph_metrics disable_cascade_attn
    disable_custom_all_reduce disable_hybrid_kv_cache_manager enable_flashinfer_autotune
    enable_layerwise_nvtx_tracing enable_logging_iteration_details enable_shm_tensor_arena
    hf_token ir_op_priority jit_monitor_mode jit_monitor_verbose kernel_config kv_events_config
    kv_offloading_backend kv_offloading_size kv_sharing_fast_prefill kv_transfer_config
    linear_backend log_config_file log_level logging_config long_prefill_token_threshold
    long_prefill_token_threshold_adaptive max_cudagraph_capture_size max_num_active_seqs
    max_num_scheduled_tokens moe_backend num_gpu_blocks_override optimization_level
    performance_mode prefill_schedule_interval prefix_cache_retention_interval
    prefix_caching_hash_algo prefix_match_unit profiler_config scheduler_reserve_full_isl
    scheduling_policy sparse_indexer_topk_backend swa_bounded_replay use_fp64_gumbel watermark
"""
ALLOWED = frozenset(_ALLOWED.split())
# Set by another key of the job.
_WITH_KEY = {
    "model": "model.path",
    "trust_remote_code": "model.trust_remote_code",
    "seed": "seed",
    "dtype": "rollout.dtype",
    "quantization": "rollout.quantization",
    "quantization_config": "rollout.quantization",
    "allow_deprecated_quantization": "rollout.quantization",
    "tensor_parallel_size": "rollout.tensor_model_parallel_size",
    "max_model_len": "rollout.max_model_len",
    "max_num_seqs": "rollout.max_num_seqs",
    "max_num_batched_tokens": "rollout.max_num_batched_tokens",
    "gpu_memory_utilization": "rollout.gpu_memory_utilization",
    "kv_cache_memory_bytes": "rollout.kv_cache_gib",
    "enforce_eager": "rollout.enforce_eager",
    "enable_prefix_caching": "rollout.enable_prefix_caching",
    "enable_chunked_prefill": "rollout.enable_chunked_prefill",
    "enable_sleep_mode": "rollout.free_cache_engine",
    "return_sampling_mask": "algorithm.sampling_replay",
    "enable_return_routed_experts": "actor.router_replay",
    "aux_output_config": "actor.router_replay",
    "enable_lora": "reshard.lora",
    "max_loras": "reshard.lora",
    "max_lora_rank": "model.lora_rank",
    "distributed_timeout_seconds": "trainer.timeout_s",
    "cpu_distributed_timeout_seconds": "trainer.timeout_s",
}
_REFUSED = (  # why, arguments
    (
        "is set by the trainer, which relies on it; remove it",
        """
        load_format tokenizer tokenizer_mode skip_tokenizer_init hf_config_path hf_overrides
        revision code_revision tokenizer_revision config_format model_weights model_impl
        model_class_overrides runner convert distributed_executor_backend worker_cls
        worker_extension_cls scheduler_cls logprobs_mode max_logprobs disable_log_stats
        weight_transfer_config model_loader_extra_config enable_batch_sharded_sampling numa_bind
        numa_bind_nodes numa_bind_cpus device_ids
        """,
    ),
    (
        "is set by the trainer, whose engines are tensor parallel "
        "(rollout.tensor_model_parallel_size); remove it",
        """
        pipeline_parallel_size data_parallel_size data_parallel_rank data_parallel_start_rank
        data_parallel_size_local data_parallel_address data_parallel_rpc_port
        data_parallel_hybrid_lb data_parallel_external_lb data_parallel_multi_port_external_lb
        data_parallel_backend prefill_context_parallel_size decode_context_parallel_size
        dcp_comm_backend dcp_q_replicate dcp_kv_cache_interleave_size cp_kv_cache_interleave_size
        enable_expert_parallel enable_ep_weight_filter enable_elastic_ep elastic_ep_max_dp_size
        enable_eplb eplb_config expert_placement_strategy enable_dbo ubatch_size
        dbo_decode_token_threshold dbo_prefill_token_threshold dp_sync_interval
        disable_nccl_for_dp_synchronization enable_hc_sp nnodes node_rank master_addr master_port
        """,
    ),
    (
        "would move weights that the sync writes in place; set "
        "rollout.tensor_model_parallel_size for less memory per rank",
        """
        offload_backend cpu_offload_gb cpu_offload_params offload_group_size offload_num_in_group
        offload_prefetch_step offload_params engram_config
        """,
    ),
    (
        "is set by the trainer for rollout.free_cache_engine; remove it",
        """
        sleep_mode_offload_cudagraph sleep_preserve_parameter_names enable_cumem_allocator
        enable_nccl_comm_suspend
        """,
    ),
    (
        "is set by the trainer for reshard.lora; remove it",
        """
        fully_sharded_loras max_cpu_loras lora_dtype lora_target_modules specialize_active_lora
        enable_mixed_moe_lora_format enable_moe_shared_loras default_mm_loras max_lora_cls_labels
        enable_tower_connector_lora
        """,
    ),
    (
        "would sample from another distribution than the one that is trained; remove it",
        """
        logits_processors watermark_config diffusion_config reasoning_config kv_cache_dtype
        kv_cache_dtype_skip_layers disable_sliding_window
        """,
    ),
    (
        "would sample by a draft model, whose weights no sync writes; remove it",
        """
        speculative_config spec_method spec_model spec_tokens per_request_spec_decode_metrics
        """,
    ),
    (
        "has no effect, because a job gives every sampling parameter itself; set "
        "rollout.temperature, rollout.top_p, rollout.top_k, rollout.stop",
        """
        override_generation_config generation_config
        """,
    ),
    (
        "has no effect on a job, which sends token ids to an engine in its own process; remove it",
        """
        structured_outputs_config reasoning_parser reasoning_parser_plugin pooler_config
        enable_prompt_embeds enable_trace_replay tokens_only stream_interval max_num_queued_reqs
        max_num_queued_tokens io_processor_plugin
        renderer_num_workers served_model_name allowed_local_media_path allowed_media_domains
        shutdown_timeout fail_on_environ_validation fault_tolerance_config enable_fault_tolerance
        ray_workers_use_nsight _api_process_count _api_process_rank
        """,
    ),
    (
        "has no effect, because the weights come from the trainer; remove it",
        """
        download_dir safetensors_load_strategy safetensors_prefetch_num_threads ignore_patterns
        safetensors_prefetch_block_size max_parallel_loading_workers use_tqdm_on_load
        pt_load_map_location
        """,
    ),
    (
        "has no effect, because prompts are text; remove it",
        """
        language_model_only limit_mm_per_prompt enable_mm_embeds interleave_mm_strings
        media_io_kwargs mm_processor_kwargs mm_processor_cache_gb mm_processor_cache_type
        mm_hasher_algorithm mm_shm_cache_max_object_size_mb mm_encoder_only mm_encoder_tp_mode
        mm_encoder_attn_backend mm_encoder_attn_dtype mm_encoder_fp8_scale_path
        mm_encoder_fp8_scale_save_path mm_encoder_fp8_scale_save_margin skip_mm_profiling
        video_pruning_rate video_pruning_method mm_tensor_ipc mm_processor_device
        mm_ipc_gpu_memory_gb mm_device_do_normalize disable_chunked_mm_input
        enable_mm_processor_stats ec_transfer_config ec_manager_config
        """,
    ),
    (
        "has no effect, because models with recurrent layers are not trained; remove it",
        """
        mamba_config mamba_cache_dtype mamba_ssm_cache_dtype mamba_block_size mamba_cache_mode
        enable_mamba_shared_prefix_checkpoint replayssm_buffer_len use_replayssm mamba_backend
        mamba_ssu_algorithm enable_mamba_cache_stochastic_rounding mamba_cache_philox_rounds
        gdn_prefill_backend kda_prefill_backend kda_decode_backend
        """,
    ),
    (
        "has no effect, because the engine's statistics are off; remove it",
        """
        aggregate_engine_logging show_hidden_metrics_for_version otlp_traces_endpoint
        collect_detailed_traces kv_cache_metrics kv_cache_metrics_sample custom_histogram_buckets
        enable_mfu_metrics
        """,
    ),
)
REFUSED = {
    **{name: f"is set by {key}; use that key" for name, key in _WITH_KEY.items()},
    **{name: why for why, names in _REFUSED for name in names.split()},
}


def llm_options(options: EngineOptions) -> dict[str, Any]:
    """Return the arguments of `vllm.LLM` for an engine without images, adapters or recorders."""
    model, rollout, on_gpu = options.model, options.rollout, torch.cuda.is_available()
    cache = {} if on_gpu else {"block_size": CPU_BLOCK_SIZE}
    return {
        "model": str(model.path),
        "trust_remote_code": model.trust_remote_code,
        # bfloat16 logits would change probabilities more than all other layers together
        "hf_overrides": {"head_dtype": "float32", **model.config_overrides},
        "load_format": "dummy",
        "dtype": rollout.dtype,
        **quantization_options(rollout.quantization),
        "skip_tokenizer_init": not rollout.stop,  # which vLLM needs to find texts
        "tensor_parallel_size": rollout.tensor_model_parallel_size,
        "distributed_executor_backend": "external_launcher",
        "seed": options.seed,
        "max_model_len": rollout.max_model_len,
        "max_num_seqs": rollout.max_num_seqs,
        "max_num_batched_tokens": rollout.max_num_batched_tokens,
        "enforce_eager": rollout.enforce_eager,
        "enable_chunked_prefill": rollout.enable_chunked_prefill,
        "enable_prefix_caching": rollout.enable_prefix_caching,
        "kv_cache_memory_bytes": None if on_gpu else int(rollout.kv_cache_gib * 2**30),
        "gpu_memory_utilization": rollout.gpu_memory_utilization,
        "enable_sleep_mode": rollout.free_cache_engine and on_gpu,
        "logprobs_mode": "processed_logprobs",
        "disable_log_stats": True,
        **cache,
        **rollout.engine_kwargs.vllm,
    }


def check_engine_options(options: Mapping[str, Any]) -> None:
    """Raise ValueError, with a line for each, for arguments that a job cannot pass to `vllm.LLM`.

    An argument that is None is vLLM's default, and passes.
    """
    prepare_environment()
    import vllm
    from vllm.engine.arg_utils import EngineArgs

    known = {field.name for field in fields(EngineArgs)}
    faults = []
    for name, value in options.items():
        if value is None or name in ALLOWED:
            continue
        if reason := REFUSED.get(name):
            faults.append(f"{name} {reason}")
        elif name in known:
            faults.append(
                f"{name} is not examined, an argument of vLLM {vllm.__version__}; remove it"
            )
        else:
            close = difflib.get_close_matches(name, ALLOWED, n=1, cutoff=0.8)
            hint = f"did you mean {close[0]}?" if close else "see the arguments of vllm.LLM"
            faults.append(f"{name} is no engine argument of vLLM {vllm.__version__}; {hint}")
    if faults:
        raise ValueError("; ".join(faults))


def check_plugins(advice: str = "uninstall these packages, or set rollout.name=hf") -> None:
    """Raise ConfigError if packages installed here add logits processors to every engine of vLLM.

    advice: what to do then.
    """
    found = [
        f"{entry.name!r} of {entry.dist.name if entry.dist else entry.value}"
        for entry in entry_points(group="vllm.logits_processors")
    ]
    if found:
        raise ConfigError(
            f"vLLM loads the logits processors {', '.join(sorted(found))} from installed packages, "
            f"which would sample from another distribution than the one that is trained; {advice}"
        )
