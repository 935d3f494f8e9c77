"""What a GPU runs between its kernels, on fake CUDA tensors: shapes, dtypes, signatures of calls.

Nothing is computed and no GPU is needed. A keyword that this torch's function does not have, or a
tensor left on the CPU, fails here as it would on a GPU.
"""

import dataclasses

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoModelForCausalLM

from hybridengine.model import pack_rollouts, packed_log_probs, packed_logits
from hybridengine.model.attention import ATTENTION
from hybridengine.model.head import patch_head
from tests.model.cases import SIZES, rollouts
from tests.tiny_models import tiny_config

pytestmark = pytest.mark.skipif(torch.version.cuda is None, reason="this torch has no CUDA")
KINDS = ("qwen2", "llama", "qwen3", "gemma2")


def on_fake_cuda(batch):
    """The batch with fake tensors of the same shapes; inside the mode."""
    fields = {f.name: getattr(batch, f.name) for f in dataclasses.fields(batch)}
    fake = {
        name: torch.empty(value.shape, dtype=value.dtype, device="cuda")
        for name, value in fields.items()
        if isinstance(value, torch.Tensor)
    }
    return dataclasses.replace(batch, **fake)


def move_to_fake_cuda(model):
    """Replace parameters (tied ones stay tied) and buffers by fake tensors; inside the mode."""
    made = {}
    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is None:
                    continue
                if tensor not in made:
                    fake = torch.empty(tensor.shape, dtype=tensor.dtype, device="cuda")
                    is_parameter = isinstance(tensor, torch.nn.Parameter)
                    made[tensor] = torch.nn.Parameter(fake) if is_parameter else fake
                tensors[name] = made[tensor]


@pytest.mark.parametrize("shared_prefix", [False, True], ids=["packed", "shared prefixes"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_a_forward_up_to_its_kernels(kind, dtype, shared_prefix):
    pairs = [(prompt, r) for prompt, response in rollouts(SIZES) for r in (response, [3, 5])]
    batch = pack_rollouts(pairs, shared_prefix=shared_prefix)
    assert (batch.subtree_ends is not None) == shared_prefix
    config = tiny_config(kind)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION, dtype=dtype)
    patch_head(model.eval())
    with FakeTensorMode(), torch.no_grad():  # a backward would need a real device
        move_to_fake_cuda(model)
        batch = on_fake_cuda(batch)
        logits = packed_logits(model, batch)
        assert logits.device.type == "cuda" and logits.shape == (len(batch.target_ids), 101)
        for result in packed_log_probs(model, batch):
            assert result.device.type == "cuda" and result.shape == batch.target_ids.shape
