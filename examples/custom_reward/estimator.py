"""A custom advantage estimator: the distance from the group's mean, clipped to [-1, 1]."""

from hybridengine.kernels import group_advantage
from hybridengine.train.algorithms import register_estimator


@register_estimator("clipped_mean")
def clipped_mean(responses, options):
    """Return advantages and returns, [T] each, 0 where masked."""
    distances = group_advantage(responses.rewards, responses.group_ids, estimator="mean")
    returns = responses.to_tokens(distances)  # of all N responses -> this rank's T tokens
    return returns.clamp(-1, 1), returns
