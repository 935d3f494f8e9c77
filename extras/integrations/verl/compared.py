"""What is compared before functions of verl are replaced.

Functions that call flash-attn where it is installed cannot run on the CPU there: they are compared
by the names that they use.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from hybridengine.integrations._compare import Probe, calling, constant, draw, with_gradients
from hybridengine.integrations.verl import advantages, losses, policy_losses

__all__ = ["KNOWN", "PROBES"]

_CORE, _FUNCTIONAL = "trainer.ppo.core_algos", "utils.torch_functional"
_BALANCING, _PADDING = "utils.seqlen_balancing", "utils.attention_utils"
_MASK = (constant(range(5)) < constant([[3], [5], [2], [4], [5], [1]])).float()
_OLD = -draw(6, 5, seed=1).abs()
_ADVANTAGES = {
    "token_level_rewards": draw(6, 5) * _MASK,
    "response_mask": _MASK,
    "index": np.array(["a", "b", "a", "b", "a", "c"], dtype=object),
    "reward_baselines": draw(6, seed=2),
    "values": draw(6, 5, seed=3) * _MASK,
    "gamma": 0.9,
    "lam": 0.8,
}
_LOSSES = {
    "old_log_prob": _OLD,
    "rollout_log_prob": _OLD,
    "log_prob": _OLD + 0.5 * draw(6, 5, seed=4),
    "advantages": draw(6, 5, seed=5),
    "response_mask": _MASK,
    "logprob": _OLD + 0.5 * draw(6, 5, seed=4),
    "ref_logprob": _OLD,
    "kl_penalty": "low_var_kl",
    "loss_mat": draw(6, 5, seed=6),
    "loss_mask": _MASK,
    "loss_agg_mode": "seq-mean-token-mean",
    "vpreds": draw(6, 5, seed=6),
    "returns": draw(6, 5, seed=7),
    "values": draw(6, 5, seed=8),
    "cliprange_value": 0.3,
}
_TRAINED = ("log_prob", "logprob", "loss_mat", "vpreds")
_LOGITS = {
    "logits": 3 * draw(2, 4, 19),
    "labels": constant(range(8)).view(2, 4),
}
_ROWS = {"logits": 3 * draw(8, 19), "chunk_size": 3}
_HEAD = {
    "hidden_states": draw(2, 4, 8),
    "vocab_weights": draw(19, 8, seed=1),
    "input_ids": constant(range(8)).view(2, 4),
    "temperature": 0.7,
}


def _options(function: Any) -> Any:
    options = {"norm_adv_by_std_in_grpo": False}
    name = function.__name__
    given = _ADVANTAGES
    if name == "compute_reinforce_plus_plus_outcome_advantage":
        options = SimpleNamespace(gamma=0.9)  # type: ignore[assignment]
    elif name == "compute_grpo_passk_outcome_advantage":  # groups of at least two
        given = given | {"index": np.array(["a", "b", "a", "b", "a", "b"], dtype=object)}
    results, _ = calling(given | {"config": options})(function)
    return [result * _MASK for result in results]  # ours are 0 elsewhere


def _policy_loss(function: Any) -> Any:
    from verl.workers.config import ActorConfig

    config = ActorConfig(
        strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1, clip_ratio_high=0.3
    )
    settings = {"dro_beta": 0.1, "clip_cov_ratio": 0.05, "kl_cov_ratio": 0.1}
    config.policy_loss.__dict__.update(settings)
    with torch.random.fork_rng(devices=[]):  # clip_cov draws
        torch.manual_seed(5)
        return calling(_LOSSES | {"config": config}, _TRAINED)(function)


def _fused_head(forward: Any) -> Any:
    module = SimpleNamespace(chunk_size=3, impl_backend="torch")
    trained = ("hidden_states", "vocab_weights")
    return with_gradients(lambda **given: forward(module, **given), _HEAD, trained)


def _padding(name: str) -> Probe:
    mask = constant([[0, 1, 1], [1, 1, 0]])
    indices = mask.flatten().nonzero().flatten()
    arguments = {
        "unpad_input": (draw(2, 3, 4), mask),
        "pad_input": (draw(4, 4), indices, 2, 3),
        "index_first_axis": (draw(6, 4), indices),
    }[name]
    return lambda function: function(*arguments)


_PARTITIONS = {"seqlen_list": [7, 3, 5, 5, 2, 8], "k_partitions": 2, "equal_size": True}


def _partitions(function: Any) -> Any:
    """The largest sum: which of several equal partitions is taken is left open."""
    (parts, _) = calling(_PARTITIONS)(function)
    lengths = _PARTITIONS["seqlen_list"]
    assert isinstance(lengths, list)
    return sorted(i for part in parts for i in part), max(
        sum(lengths[i] for i in part) for part in parts
    )


PROBES: dict[str, Probe] = {
    **{
        f"{_FUNCTIONAL}.{name}": calling(_LOGITS, ["logits"])
        for name in ("entropy_from_logits", "logprobs_from_logits_naive", "logprobs_from_logits_v2")
    },
    f"{_FUNCTIONAL}.entropy_from_logits_with_chunking": calling(_ROWS, ["logits"]),
    **{f"{_CORE}.{name}": _options for name in advantages.__all__},
    **{f"{_CORE}.{name}": calling(_LOSSES, _TRAINED) for name in losses.__all__},
    **{f"{_CORE}.{name}": _policy_loss for name in policy_losses.__all__},
    **{f"{_PADDING}.{n}": _padding(n) for n in ("unpad_input", "pad_input", "index_first_axis")},
    f"{_BALANCING}.karmarkar_karp": _partitions,
    f"{_BALANCING}.get_seqlen_balanced_partitions": _partitions,
    "utils.experimental.torch_functional.FusedLinearForPPO.forward": _fused_head,
}
KNOWN = {
    f"{_FUNCTIONAL}.logprobs_from_logits": """
        FLAH_ATTN_CROSS_ENTROPY_LOSS_AVAILABLE NPU_CROSS_ENTROPY_LOSS_AVAILABLE environ get
        logprobs_from_logits_flash_attn logprobs_from_logits_torch_npu logprobs_from_logits_v2 os
        reshape shape view""",
    f"{_FUNCTIONAL}.logprobs_from_logits_flash_attn": "cross_entropy_loss isinstance tuple",
    f"{_FUNCTIONAL}.log_probs_from_logits_response": "logprobs_from_logits",
    f"{_FUNCTIONAL}.log_probs_from_logits_response_rmpad": """
        flash_attn.bert_padding logprobs_from_logits pad_input roll shape squeeze torch unpad_input
        unsqueeze""",
    f"{_FUNCTIONAL}.log_probs_from_logits_all_rmpad": """
        flash_attn.bert_padding get_device_name logprobs_from_logits pad_input roll squeeze torch
        transpose unsqueeze verl.utils.attention_utils""",
}
