"""What becomes of a weight that vLLM processes after loading; no engine takes part."""

from __future__ import annotations

import pytest
import torch

from tests.ranks import message_of

pytest.importorskip("vllm", reason="the rollout engine; `make setup` installs it")


class Layer(torch.nn.Module):
    """One weight, and a quantization method that does `change` to it after loading."""

    def __init__(self, change) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(4, 16, 8))
        self.quant_method, self.change, self.calls = self, change, 0

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        self.calls += 1
        self.change(self)


def pack_away(layer: Layer) -> None:
    layer.weight = torch.nn.Parameter(torch.empty(0))


def scale(layer: Layer) -> None:
    layer.weight.data.mul_(2)


def allocate(layer: Layer) -> None:
    layer.weight.data = layer.weight.data.flip(0)


def only_once(layer: Layer) -> None:
    if layer.calls > 1:
        raise NotImplementedError("no reload")
    layer.weight.data.copy_(layer.weight.data.flip(0))


def first_only(layer: Layer) -> None:
    if layer.calls == 1:
        layer.weight.data.copy_(layer.weight.data.flip(0))


def flip(layer: Layer) -> None:
    layer.weight.data.copy_(layer.weight.data.flip(0))


def leave(layer: Layer) -> None:
    layer.weight = torch.nn.Parameter(layer.weight.data.clone())


REASONS = {
    pack_away: "shape=(0,)",
    scale: "values are computed",
    allocate: "allocates it anew",
    only_once: "cannot be processed again: no reload",
    first_only: "does something else",
    flip: None,
    leave: None,
}


@pytest.mark.parametrize("change", REASONS)
def test_processing_is_followed_or_refused_by_name(change) -> None:
    from hybridengine.engine.vllm.post_load import PostLoadProcessing
    from hybridengine.sync.layout import identity_layout

    model = torch.nn.ModuleDict({"experts": Layer(change)})
    layer = model["experts"]
    layout = identity_layout({"experts.weight": layer.weight.detach()})
    post_load = PostLoadProcessing()
    post_load.run(lambda m: m["experts"].process_weights_after_loading(m["experts"]), model)
    after = layer.weight.detach().clone()
    shapes = {"experts.weight": (4, 16, 8)}
    message = message_of(lambda: post_load.adapt_layout(model, layout, shapes))
    assert torch.equal(layer.weight, after), "its values are put back"
    if (reason := REASONS[change]) is None:
        assert message == "no error"
    else:
        assert message.startswith("LayoutError: vLLM changed the weight 'experts.weight' after")
        assert reason in message and "moe_backend" in message, message
