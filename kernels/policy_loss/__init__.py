"""policy_loss: the policy-gradient losses of the field over packed tokens, globally normalised."""

from .aggregation import LOSS_AGG_MODES
from .op import policy_loss
from .terms import LOSS_MODES, select_by_covariance, token_kl

__all__ = ["LOSS_AGG_MODES", "LOSS_MODES", "policy_loss", "select_by_covariance", "token_kl"]
