"""How many products merge an adapter: few on a GPU, which meta tensors stand for."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hybridengine.sync.adapter import Adapter
from hybridengine.sync.shards import RowRange


class Products(TorchDispatchMode):
    """Counts matrix products."""

    count = 0

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        self.count += function.overloadpacket is torch.ops.aten.mm
        return function(*arguments, **(options or {}))


def products(rows: int, columns: int, device: str) -> int:
    base = torch.empty(rows, columns, dtype=torch.bfloat16, device=device)
    adapter = Adapter(base.new_ones(rows, 2), base.new_ones(2, columns), 0.5)
    with Products() as seen:
        adapter.merge(base, (0, 0), (RowRange(0, rows), RowRange(0, columns)))
    return seen.count


def test_a_gpu_merges_a_weight_of_7b_in_one_to_three_launches() -> None:
    assert products(4096, 4096, "meta") == 1
    assert products(11008, 4096, "meta") == 3
    assert products(1024, 1024, "cpu") == 4
