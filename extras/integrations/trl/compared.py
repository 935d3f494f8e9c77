"""What is compared before functions of TRL are replaced."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hybridengine.integrations._compare import Probe, calling, constant, draw, with_gradients

__all__ = ["KNOWN", "PROBES"]

_LOGITS, _IDS = 3 * draw(2, 5, 19), constant(range(10)).view(2, 5)
_MASK = constant([[1, 1, 0, 1, 1], [0, 1, 1, 1, 0]])
_HIDDEN, _WEIGHT, _BIAS = draw(7, 8, seed=1), draw(19, 8, seed=2), draw(19, seed=3)
_OUTPUTS = ("entropy", "log_sum_sq_probs", "mean_logits", "is_top1")


def _chunked(function: Any) -> Any:
    def call(hidden: Tensor, weight: Tensor, bias: Tensor) -> Any:
        ids = torch.arange(7)
        return function.apply(hidden, weight, bias, ids, 0.7, 8, 5.0, 0.5, _OUTPUTS)

    inputs = {"hidden": _HIDDEN, "weight": _WEIGHT, "bias": _BIAS}
    return with_gradients(call, inputs, tuple(inputs))


def _head(function: Any) -> Any:
    from transformers import AutoModelForCausalLM, LlamaConfig

    config = LlamaConfig(
        vocab_size=19,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
    )
    config._attn_implementation = "eager"
    with torch.random.fork_rng(devices=[]):
        model: Any = AutoModelForCausalLM.from_config(config)
    for i, parameter in enumerate(model.parameters()):
        parameter.data = 0.5 * draw(*parameter.shape, seed=i)
    function(model, 0.7, outputs=("log_probs", *_OUTPUTS))
    labels = _IDS.masked_fill(_MASK == 0, -100)
    output = model(input_ids=_IDS, labels=labels, fused_lm_head=True, num_items_in_batch=5)
    weights = model.lm_head.weight, model.model.embed_tokens.weight
    total = output.loss + output.log_probs.square().sum() + output.entropy.square().sum()
    fields = {name: value for name, value in output.items() if name != "label_mask"}
    return fields, torch.autograd.grad(total, weights)


_ROWS = {"logits": _LOGITS, "index": _IDS, "temperature": 0.7, "row_mask": _MASK}
_VLLM = "generation.vllm_generation.VLLMGeneration"
_SYNC = """
    _streaming_iter accelerator info is_main_process is_peft_model logger merge_adapter model
    model_version pause resume rollout_worker send_weights time unmerge_adapter unwrap_model
    update_model_version wait_for_everyone weight_transfer"""
PROBES: dict[str, Probe] = {
    "trainer.utils.selective_log_softmax": calling(_ROWS, ["logits"]),
    "trainer.utils.entropy_from_logits": calling({"logits": _LOGITS}, ["logits"]),
    "trainer.utils.selective_log_softmax_and_entropy": calling(_ROWS, ["logits"]),
    "kernels.chunked_logprob.ChunkedLogProbFunction": _chunked,
    "trainer.utils.add_fused_lm_head": _head,
}
KNOWN = {
    f"{_VLLM}._init_vllm": """
        ImportError LLM Linear4bit Linear8bitLt VLLMClient ValueError _llm_weights_sleeping
        accelerator bnb device distributed enable_sleep_mode ensure_master_addr_port environ
        gpu_memory_utilization group_port init_communicator is_bitsandbytes_available
        is_main_process is_vllm_available isinstance list llm local_process_index max_model_length
        max_num_seqs mode model model_impl name_or_path named_modules new_subgroups_by_enumeration
        nn num_processes os process_index range server_base_url server_host server_port
        server_timeout sleep str tensor_parallel_size torch tp_group trust_remote_code vllm_client
        wait_for_everyone""",
    f"{_VLLM}.sync_weights": """
        _iter_named_params _llm_weights_sleeping _weight_metadata accelerator driver_worker dtype
        empty_cache enable_sleep_mode is_main_process list llm llm_engine load_weights mode model
        model_executor model_runner removeprefix reset_prefix_cache shape str update_named_params
        vllm_client wake_up""",
    "experimental.async_grpo.async_grpo_trainer.AsyncGRPOTrainer._sync_weight_merged": _SYNC,
    "experimental.async_distillation.async_distillation_trainer.AsyncDistillationTrainer"
    "._sync_weight_merged": _SYNC,
    "trainer.grpo_trainer.GRPOTrainer._compute_loss": """
        ValueError _entropy_bonus_enabled _entropy_window_stats _get_per_token_logps_and_entropies
        _last_world_entropy _metrics accelerator append args aux_loss_enabled beta cat clamp
        current_gradient_accumulation_steps delta detach device dim entropy_coef entropy_coef_delta
        entropy_coef_max entropy_coef_min entropy_target epsilon_high epsilon_low exp float gather
        gather_for_metrics get get_gamma_weights get_high_entropy_mask get_off_policy_mask
        importance_sampling_level item loss_type max max_completion_length mean min model nanmax
        nanmean nanmin num_processes off_policy_mask_threshold reduce router_aux_loss_coef
        sapo_temperature_neg sapo_temperature_pos shape sigmoid size squeeze stack
        steps_per_generation sum sync_gradients tensor top_entropy_quantile torch training
        unsqueeze use_adaptive_entropy use_bias_correction_kl use_vllm vespo_k_neg vespo_k_pos
        vespo_lambda_neg vespo_lambda_pos vllm_importance_sampling_correction where""",
}
