"""policy_loss: policy-gradient losses over packed tokens, normalised by the global batch."""

from .covariance import select_by_covariance
from .op import policy_loss
from .terms import LOSS_MODES, token_kl

__all__ = ["LOSS_MODES", "policy_loss", "select_by_covariance", "token_kl"]
