"""What a person sees of a run: metrics, progress, rollouts, learning curves, a summary, phases."""

from hybridengine.runtime.status import PhaseStatus, RankStatus, read_status
from hybridengine.tracking.curves import plot_learning_curves
from hybridengine.tracking.metrics import MetricsLogger, check_loggers
from hybridengine.tracking.performance import FlopCounter, performance_metrics
from hybridengine.tracking.progress import Progress
from hybridengine.tracking.rollouts import write_rollouts
from hybridengine.tracking.summary import accuracy_interval, gain_interval, write_summary

__all__ = [
    "FlopCounter",
    "MetricsLogger",
    "PhaseStatus",
    "Progress",
    "RankStatus",
    "accuracy_interval",
    "check_loggers",
    "gain_interval",
    "performance_metrics",
    "plot_learning_curves",
    "read_status",
    "write_rollouts",
    "write_summary",
]
