"""The Python interface: `hybridengine.Trainer`, see docs/python.md."""

from hybridengine.api.trainer import Step, Trainer

__all__ = ["Step", "Trainer"]
