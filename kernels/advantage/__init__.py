"""Advantages: group-relative ones from one reward per response, GAE, and whitening."""

from .gae import gae
from .group import GROUP_ESTIMATORS, group_advantage
from .whiten import whiten

__all__ = ["GROUP_ESTIMATORS", "gae", "group_advantage", "whiten"]
