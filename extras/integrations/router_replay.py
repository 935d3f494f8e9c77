"""Router replay in others' trainers: any Hugging Face mixture of experts, also under FSDP2.

    from hybridengine.integrations import router_replay

    replay = router_replay.attach(model)            # once, before or after fully_shard
    with replay.record(input_ids.numel()) as call:  # R2: what the pass of the old log-probs selects
        old = model(input_ids=input_ids, ...)
    with replay.replay(call.routes):                # or the engine's (R3), [tokens, layers, k]
        loss = loss_of(model(input_ids=input_ids, ...))
    loss.backward()                                 # also with gradient checkpointing

Routes are in the order of the tokens that the call reads, those of padding included: reshape
[B, L, layers, k] as input_ids; -1 stands for a token without a record, which routes naturally. They
come from vLLM as `CompletionOutput.routed_experts`, whose rows are those of prompt and response but
the last token.
"""

from __future__ import annotations

from torch import nn

from hybridengine.moe.router_replay import RouterReplay

__all__ = ["RouterReplay", "attach"]


def attach(model: nn.Module) -> RouterReplay:
    """Let the routers of `model` replay and record; return what does, the same at every call.

    Outside of `RouterReplay.replay` and `record` the model computes as before. Raises ModelError
    for a model without experts, and for a router that does not select by one `torch.topk`.
    """
    return RouterReplay.of(model) or RouterReplay(model)
