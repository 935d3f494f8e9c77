"""Which ranks form a tensor-parallel group of the engine."""

from __future__ import annotations


def tp_groups(world_size: int, tp_size: int, ranks_per_node: int | None = None) -> list[list[int]]:
    """Tensor-parallel groups over the training ranks, strided: group j is {j, j+N/t, j+2N/t, …}.

    Rank r then is TP rank r // (N/t), so the dim-0 rows FSDP2 gives it lie inside its TP slice
    (HybridFlow's zero-redundancy grouping, arXiv 2409.19256, section 5.3). With several nodes the
    groups are strided inside each node if they fit there: generation reduces over a group twice per
    layer and token, which must not cross nodes.
    """
    if tp_size < 1 or world_size % tp_size:
        raise ValueError(
            f"tensor_model_parallel_size: got {tp_size}, expected a divisor of the {world_size} "
            "ranks. Change it or the number of ranks."
        )
    span = ranks_per_node or world_size
    if span % tp_size or world_size % span:
        span = world_size
    stride = span // tp_size
    return [
        list(range(node + j, node + span, stride))
        for node in range(0, world_size, span)
        for j in range(stride)
    ]
