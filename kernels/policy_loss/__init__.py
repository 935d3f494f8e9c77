"""policy_loss: policy-gradient losses over packed tokens, normalised by the global batch."""

from .centering import RolloutSupport, score_centering
from .covariance import select_by_covariance
from .op import policy_loss
from .terms import LOSS_MODES, token_kl
from .tokens import TokenLosses, token_policy_loss
from .vespo import vespo_weights

__all__ = [
    "LOSS_MODES",
    "RolloutSupport",
    "TokenLosses",
    "policy_loss",
    "score_centering",
    "select_by_covariance",
    "token_kl",
    "token_policy_loss",
    "vespo_weights",
]
