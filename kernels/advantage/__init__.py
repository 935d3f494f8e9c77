"""Advantages: group-relative ones from one reward per response, GAE, and whitening."""

from .op import GROUP_ESTIMATORS, gae, group_advantage, whiten

__all__ = ["GROUP_ESTIMATORS", "gae", "group_advantage", "whiten"]
