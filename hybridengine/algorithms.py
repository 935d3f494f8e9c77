"""Alias of `hybridengine.trainer.algorithms`, which users' estimator files import."""

from hybridengine.trainer.algorithms import *  # noqa: F403
