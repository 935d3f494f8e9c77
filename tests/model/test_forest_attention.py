"""The attention function of the model over a forest, on every device."""

import pytest
import torch

from hybridengine.model.attention import varlen_attention
from tests import tolerances
from tests.kernels.attention.cases import forest_of, plain_attention, problem, results


class Layer(torch.nn.Module):
    layer_idx = 0
    is_causal = True


@pytest.mark.parametrize("device", ("cpu", pytest.param("cuda", marks=pytest.mark.gpu)))
@pytest.mark.parametrize("window", (None, 16))
def test_a_float32_model_with_shared_prefixes(device, window):
    forest = forest_of((60, [30, 12]), 25)
    case = problem(forest, 4, 2, 32, sinks=True)
    cu_seqlens = torch.tensor([0, 102, 127], dtype=torch.int32, device=device)

    def call(q, k, v, sinks):
        rows = (x.transpose(0, 1)[None] for x in (q, k, v))
        out, _ = varlen_attention(
            Layer(),
            *rows,
            None,
            scaling=0.2,
            s_aux=sinks,
            sliding_window=window,
            cu_seq_lens_q=cu_seqlens,
            cu_seq_lens_k=cu_seqlens,
            max_length_q=102,
            subtree_ends=forest.subtree_ends.to(device),
            tree_position_ids=forest.position_ids.to(device),
        )
        return out[0]

    def plain(q, k, v, sinks):
        return plain_attention(q, k, v, forest, 0.2, window, sinks=sinks)

    exact = results(plain, case, torch.float64)
    for got, expected in zip(results(call, case, device=device), exact, strict=True):
        torch.testing.assert_close(got.double(), expected, **tolerances.ATTENTION)
