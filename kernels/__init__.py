"""The operators of LLM reinforcement learning, one file each.

Every operator is a public function over a `torch.library` op with a fake kernel, an autograd
formula and a plain-PyTorch `reference` backend that is its specification.
"""

from ._backend import backend_table, choose_backend
from .advantage import GROUP_ESTIMATORS, gae, group_advantage, whiten
from .balance import Imbalance, balance, balance_by_tokens, imbalance
from .logprob import RowStats, check_labels, token_log_probs
from .packing import Packed, pack, pack_sequences, unpack
from .policy_loss import LOSS_AGG_MODES, policy_loss
from .strided_copy import strided_copy
from .token_loss import LOSS_MODES

__all__ = [
    "GROUP_ESTIMATORS",
    "LOSS_AGG_MODES",
    "LOSS_MODES",
    "Imbalance",
    "Packed",
    "RowStats",
    "backend_table",
    "balance",
    "balance_by_tokens",
    "check_labels",
    "choose_backend",
    "gae",
    "group_advantage",
    "imbalance",
    "pack",
    "pack_sequences",
    "policy_loss",
    "strided_copy",
    "token_log_probs",
    "unpack",
    "whiten",
]
