"""Packed batches of models with linear attention: Gated DeltaNet, KDA, Mamba, short convolutions.

extension    what the core asks for
functions    the functions that transformers' layers call, over packed segments
layers       a model whose layers call them
segments     the segments of a packed batch
"""

from hybridengine.hybrid.layers import pack_linear_attention, refuse_packed, takes_packed

__all__ = ["pack_linear_attention", "refuse_packed", "takes_packed"]
