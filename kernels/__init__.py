"""The operators of LLM reinforcement learning: a module or a package each.

An operator is a public function over a `torch.library` op with a fake kernel, an autograd formula
and a plain-PyTorch `reference` backend, its specification. Modules with a leading underscore are
what operators share.

Only `hybridengine.kernels` has them. In a clone's folder the package `kernels` that transformers
looks for, Hugging Face's, is this file: imported under that name it is empty, or else every
operator would be registered a second time, which invalidates those in use.
"""

if __name__ == "hybridengine.kernels":
    from ._aggregation import LOSS_AGG_MODES
    from ._backend import backend_table, choose_backend
    from .advantage import GROUP_ESTIMATORS, gae, group_advantage, whiten
    from .aggregate import aggregate_loss
    from .attention import tree_attention
    from .balance import Imbalance, balance, balance_by_tokens, imbalance
    from .block_quantize import block_quantize
    from .causal_conv1d import causal_conv1d
    from .changes import Changed, change_mask, mark_changed_, take_changed
    from .checksum import bit_checksum
    from .decode_linear import decode_linear
    from .gemm import mixed_gemm
    from .grouped_linear import grouped_linear
    from .layer import gated_activation, layer_norm, rms_norm
    from .linear import (
        LinearStats,
        has_fast_products,
        linear_cross_entropy,
        linear_distillation_loss,
        linear_policy_loss,
        linear_token_log_probs,
    )
    from .linear_recurrence import linear_recurrence
    from .logprob import RowStats, check_labels, cross_entropy, token_entropy, token_log_probs
    from .memory_pool import empty_from_pool
    from .orthogonalize import orthogonalize
    from .packing import Packed, PackedForest, pack, pack_forest, pack_sequences, unpack
    from .paged_attention import paged_attention, write_kv_cache
    from .policy_loss import (
        LOSS_MODES,
        RolloutSupport,
        TokenLosses,
        policy_loss,
        score_centering,
        select_by_covariance,
        token_kl,
        token_policy_loss,
        vespo_weights,
    )
    from .rollout_correction import REJECTION_CRITERIA, RolloutCorrection, rollout_correction
    from .rollout_metrics import rollout_metrics
    from .sampling import SampledTokens, sample_tokens
    from .sparse_linear import sparse_linear_token_log_probs
    from .strided_copy import strided_copy
    from .value_loss import value_loss

    __all__ = [
        "GROUP_ESTIMATORS",
        "LOSS_AGG_MODES",
        "LOSS_MODES",
        "REJECTION_CRITERIA",
        "Changed",
        "Imbalance",
        "LinearStats",
        "Packed",
        "PackedForest",
        "RolloutCorrection",
        "RolloutSupport",
        "RowStats",
        "SampledTokens",
        "TokenLosses",
        "aggregate_loss",
        "backend_table",
        "balance",
        "balance_by_tokens",
        "bit_checksum",
        "block_quantize",
        "causal_conv1d",
        "change_mask",
        "check_labels",
        "choose_backend",
        "cross_entropy",
        "decode_linear",
        "empty_from_pool",
        "gae",
        "gated_activation",
        "group_advantage",
        "grouped_linear",
        "has_fast_products",
        "imbalance",
        "layer_norm",
        "linear_cross_entropy",
        "linear_distillation_loss",
        "linear_policy_loss",
        "linear_recurrence",
        "linear_token_log_probs",
        "mark_changed_",
        "mixed_gemm",
        "orthogonalize",
        "pack",
        "pack_forest",
        "pack_sequences",
        "paged_attention",
        "policy_loss",
        "rms_norm",
        "rollout_correction",
        "rollout_metrics",
        "sample_tokens",
        "score_centering",
        "select_by_covariance",
        "sparse_linear_token_log_probs",
        "strided_copy",
        "take_changed",
        "token_entropy",
        "token_kl",
        "token_log_probs",
        "token_policy_loss",
        "tree_attention",
        "unpack",
        "value_loss",
        "vespo_weights",
        "whiten",
        "write_kv_cache",
    ]
