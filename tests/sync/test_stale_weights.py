"""Whatever has written to a parameter or an engine, a sync leaves the bits of a dense one."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from hybridengine.model.optim import Optimizer
from hybridengine.remote.sync.delta import without_aliases
from hybridengine.sync.resharder import Resharder
from hybridengine.sync.shards import full_tensor, local_shard
from hybridengine.sync.weight_target import EngineState, bit_checksums
from tests.sync.memory_engine import MemoryEngine, Shapes, build, expected, values

SHAPES: Shapes = {
    "q": ("column", (24, 10)),
    "out": ("row", (11, 16)),
    "norm": ("replicated", (13,)),
    "computed": ("replicated", (6, 4)),
}
COMPUTED = {"by_loader": ("computed",)}

pytestmark = pytest.mark.usefixtures("world_of_one")


@pytest.fixture
def world_of_one() -> Iterator[None]:
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    yield
    torch.distributed.destroy_process_group()


class Policy(nn.Module):
    def __init__(self, sharded: bool) -> None:
        super().__init__()
        for name, value in values(SHAPES).items():
            self.register_parameter(name, nn.Parameter(value))
        if sharded:
            fully_shard(self)

    def set_gradients(self) -> None:
        for p in self.parameters():
            p.grad = torch.randn_like(p)

    def other(self) -> dict[str, torch.Tensor]:
        """Other values, placed as the parameters are."""
        return {name: p.detach() * 2 for name, p in self.named_parameters()}


class Training:
    """A policy, its optimizer, and an engine that is synced with deltas."""

    def __init__(self, sharded: bool) -> None:
        torch.manual_seed(0)
        self.model = Policy(sharded)
        self.optimizer = Optimizer(self.model, lr=1e-5, total_steps=99)
        self.engine, self.resharder = self.connect()

    def connect(self) -> tuple[MemoryEngine, Resharder]:
        engine, _, _ = build(SHAPES, 1, full=values(SHAPES), **COMPUTED)
        read = lambda: dict(self.model.named_parameters())  # noqa: E731
        return engine, Resharder(read, engine, 4096, delta="on")

    def deltas(self, count: int) -> Iterator[None]:
        """Run steps, each with a sync that sends a delta."""
        for _ in range(count):
            self.step()
            assert self.sync()
            yield

    def step(self) -> None:
        self.model.set_gradients()
        self.optimizer.step(1.0)

    def sync(self) -> bool:
        """Return whether it was a delta; the engine has the policy's bits."""
        report = self.resharder.sync()
        self.check(self.engine)
        return report.delta

    def check(self, engine: MemoryEngine) -> None:
        full = {name: full_tensor(p.detach()).clone() for name, p in self.model.named_parameters()}
        for name, tensor in expected(engine, full).items():
            assert torch.equal(engine.tensors[name], tensor), name


def each(write: Callable[[torch.Tensor], object]) -> Callable[[Policy], None]:
    def write_all(model: Policy) -> None:
        for parameter in model.parameters():
            write(parameter)

    return write_all


def set_data(p: torch.Tensor) -> None:
    p.data = p.data * 2


def in_inference_mode(model: Policy) -> None:
    with torch.inference_mode():
        torch._foreach_mul_(list(model.parameters()), 2)


def by_optimizer(kind: type[torch.optim.Optimizer], **options: bool) -> Callable[[Policy], None]:
    def step(model: Policy) -> None:
        model.set_gradients()
        with torch.enable_grad():
            kind(model.parameters(), lr=0.1, **options).step()

    return step


def flip_a_bit(p: torch.Tensor) -> None:
    local_shard(p).data.view(torch.int32).view(-1)[-1:].bitwise_xor_(1 << 16)


def write_storage(p: torch.Tensor) -> None:
    local = local_shard(p).detach()
    local.untyped_storage().copy_((local * 2).untyped_storage())


def write_numpy(p: torch.Tensor) -> None:
    array = local_shard(p).detach().numpy()
    array *= 2


def write_memory(p: torch.Tensor) -> None:
    local = local_shard(p).detach()
    ctypes.memset(local.data_ptr(), 0, local.nbytes)


def replace_parameters(model: Policy) -> None:
    for name, value in model.other().items():
        setattr(model, name, nn.Parameter(value))


def vector_to_parameters(model: Policy) -> None:
    vector = torch.cat([value.view(-1) for value in model.other().values()])
    nn.utils.vector_to_parameters(vector, model.parameters())


WRITES: dict[str, Callable[[Policy], object]] = {
    "load_state_dict": lambda model: model.load_state_dict(model.other()),
    "load_state_dict, assign": lambda model: model.load_state_dict(model.other(), assign=True),
    "set_model_state_dict": lambda model: set_model_state_dict(model, model.other()),
    "set_model_state_dict, full": lambda model: set_model_state_dict(
        model,
        {name: full_tensor(value) for name, value in model.other().items()},
        options=StateDictOptions(full_state_dict=True),
    ),
    "mul_": each(lambda p: p.mul_(2)),
    "copy_": each(lambda p: p.copy_(p.detach() * 2)),
    "add_": each(lambda p: p.add_(p, alpha=2)),
    "detach": each(lambda p: p.detach().mul_(2)),
    "out=": each(lambda p: torch.mul(p, 2, out=p)),
    "init.ones_": each(nn.init.ones_),
    "init.normal_": each(nn.init.normal_),
    "foreach": lambda model: torch._foreach_mul_(list(model.parameters()), 2),
    "inference_mode": in_inference_mode,
    "SGD": by_optimizer(torch.optim.SGD, foreach=False),
    "SGD, foreach": by_optimizer(torch.optim.SGD, foreach=True),
    "AdamW, fused": by_optimizer(torch.optim.AdamW, fused=True),
    "AdamW, foreach": by_optimizer(torch.optim.AdamW, foreach=True),
    "half().float()": lambda model: model.half().float(),
    "data.mul_": each(lambda p: p.data.mul_(2)),
    "local mul_": each(lambda p: local_shard(p).mul_(2)),
    "local data": each(lambda p: local_shard(p).data.copy_(local_shard(p) * 2)),
    "one bit": each(flip_a_bit),
    "storage": each(write_storage),
    "numpy": each(write_numpy),
    "memory": each(write_memory),
    "new parameters": replace_parameters,
    "swap_tensors": each(
        lambda p: torch.utils.swap_tensors(p, nn.Parameter(p.detach() * 2, p.requires_grad))
    ),
}
# Not implemented for DTensor.
PLAIN_WRITES: dict[str, Callable[[Policy], object]] = {
    "vector_to_parameters": vector_to_parameters,
    "set_": each(lambda p: p.set_(p.detach() * 2)),
    "data =": each(set_data),
    "foreach copy": lambda model: torch._foreach_copy_(
        list(model.parameters()), list(model.other().values())
    ),
}
CASES = [(sharded, name) for sharded in (True, False) for name in WRITES]
CASES += [(False, name) for name in PLAIN_WRITES]


@pytest.mark.parametrize(("sharded", "name"), CASES)
def test_every_way_to_write_a_parameter(sharded: bool, name: str) -> None:
    """Before and after an update, and without one: the engine has the new bits."""
    training = Training(sharded)
    model, write = training.model, (WRITES | PLAIN_WRITES)[name]
    assert isinstance(next(model.parameters()), DTensor) == sharded

    def overwrite() -> None:
        before = [full_tensor(p.detach()).clone() for p in model.parameters()]
        with torch.no_grad():
            write(model)
        written = zip(before, model.parameters(), strict=True)
        assert not all(torch.equal(b, full_tensor(p.detach())) for b, p in written)

    assert not training.sync(), "the first"
    training.step()
    assert training.sync()
    orders = [(overwrite,), (overwrite, training.step), (training.step, overwrite)]
    for order in [*orders, (training.step, overwrite, training.step)]:
        for one in order:
            one()
        training.sync()
        training.sync()
        training.step()
        training.sync()


def test_deltas_go_on_after_a_write() -> None:
    """What a write changes is found, and sent if it is little."""
    training = Training(sharded=True)
    training.sync()
    for _ in training.deltas(2):
        training.model.norm.data.mul_(2)
        assert training.sync() and training.resharder.deltas.changed > 0
        assert training.sync() and training.resharder.deltas.changed == 0


def test_two_engines_of_one_model() -> None:
    """Each connection compares with what it has sent itself."""
    training = Training(sharded=True)
    other, second = training.connect()
    deltas = []
    for _ in range(3):
        training.step()
        deltas.append((training.sync(), second.sync().delta))
        training.check(other)
    assert deltas == [(False, False), (True, True), (True, True)]


def load_full(engine: MemoryEngine) -> None:
    engine.load_full([("computed", torch.ones(6, 4))])


def replace_tensors(engine: MemoryEngine) -> None:
    for name, tensor in engine.tensors.items():
        engine.tensors[name] = torch.full_like(tensor, float("nan"))


def to_tensors(write: Callable[[torch.Tensor], object]) -> Callable[[MemoryEngine], None]:
    def write_all(engine: MemoryEngine) -> None:
        for tensor in engine.tensors.values():
            write(tensor)

    return write_all


def zero_in_inference_mode(tensor: torch.Tensor) -> None:
    with torch.inference_mode():
        tensor.zero_()


ENGINE_WRITES: dict[str, Callable[[MemoryEngine], None]] = {
    "zero_": to_tensors(torch.Tensor.zero_),
    "data": to_tensors(lambda tensor: tensor.data.mul_(2)),
    "numpy": to_tensors(lambda tensor: tensor.view(torch.int16).numpy().fill(3)),
    "inference_mode": to_tensors(zero_in_inference_mode),
    "one element": to_tensors(lambda tensor: tensor.view(-1)[-1:].neg_()),
    "load_full": load_full,
    "other tensors": replace_tensors,
}


def test_a_delta_leaves_the_checksums_of_the_engine() -> None:
    """They are computed from the changes, and by reading the tensors that no delta writes."""
    training = Training(sharded=True)
    training.sync()
    for _ in training.deltas(3):
        state = training.resharder.engine_state
        assert state is not None and state.checksums == EngineState.of(training.engine).checksums


def test_tensors_that_share_memory_are_read_after_a_delta() -> None:
    tied = torch.zeros(2, 3).bfloat16()
    weights = {"a": tied, "b": tied.view(3, 2), "alone": torch.zeros(4).bfloat16()}
    assert list(without_aliases(weights)) == ["alone"]


def test_writes_to_the_engine() -> None:
    training = Training(sharded=True)
    training.sync()
    for name, write in ENGINE_WRITES.items():
        before = bit_checksums(list(training.engine.tensors.values()))
        write(training.engine)
        assert bit_checksums(list(training.engine.tensors.values())) != before, name
        training.step()
        assert not training.sync(), name
        training.step()
        assert training.sync(), name


def test_an_engine_of_inference_tensors() -> None:
    """They have no version counters."""
    engine, shards, resharder = build(
        {name: SHAPES[name] for name in ("q", "out", "norm")}, 1, full=values(SHAPES), delta="on"
    )
    with torch.inference_mode():
        for name, tensor in engine.tensors.items():
            engine.tensors[name] = torch.zeros_like(tensor)
    deltas = []
    for version in range(1, 5):
        local_shard(shards["q"])[0] += 1
        if version == 3:
            with torch.inference_mode():
                engine.tensors["norm"].zero_()
        deltas.append(resharder.sync(version).delta)
        full = {name: local_shard(tensor) for name, tensor in shards.items()}
        for name, tensor in expected(engine, full).items():
            assert torch.equal(engine.tensors[name], tensor), name
    assert deltas == [False, True, False, True]
