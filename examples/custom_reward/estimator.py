"""An advantage estimator of one's own: the distance from the group's mean, at most 1."""

from hybridengine.kernels import group_advantage

from hybridengine.trainer.algorithms import register_estimator


@register_estimator("clipped_mean")
def clipped_mean(responses, options):
    """Advantages and returns, [T] each, 0 where masked."""
    out = group_advantage(
        responses.rewards,
        responses.group_ids,
        estimator="mean",
        cu_seqlens=responses.cu_seqlens,
        response_mask=responses.response_mask,
    )
    return out.clamp(-1, 1), out
