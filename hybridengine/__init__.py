"""The fast path of LLM reinforcement learning: fused kernels and a zero-redundancy reshard.

Importing this is light: neither vLLM nor transformers is loaded until it is used.
"""

__version__ = "0.1.0"
__all__ = ["__version__"]
