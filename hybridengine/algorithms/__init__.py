"""Names for the algorithms that the kernels make up: what a config chooses from."""

from .registry import (
    ESTIMATORS,
    AdvantageOptions,
    Responses,
    advantages,
    register_estimator,
)

__all__ = ["ESTIMATORS", "AdvantageOptions", "Responses", "advantages", "register_estimator"]
