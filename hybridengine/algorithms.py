"""Alias of `hybridengine.train.algorithms`, which users' estimator files import."""

from hybridengine.train.algorithms import *  # noqa: F403
