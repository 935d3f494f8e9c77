"""Names for the algorithms that the kernels make up: what a config chooses from."""

from .kl import KLController
from .registry import (
    ESTIMATORS,
    NEEDS,
    AdvantageOptions,
    Responses,
    advantages,
    check_estimator,
    register_estimator,
)

__all__ = [
    "ESTIMATORS",
    "NEEDS",
    "AdvantageOptions",
    "KLController",
    "Responses",
    "advantages",
    "check_estimator",
    "register_estimator",
]
