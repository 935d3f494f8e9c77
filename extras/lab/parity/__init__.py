"""Compare a trained model with the engine that generates for it, operator by operator."""

from hybridengine.lab.parity.compare import Finding, Parity, Report, attach

__all__ = ["Finding", "Parity", "Report", "attach"]
