"""Random cases of syncs: frozen parameters, encodings, adapters, deltas, and what happens between.

`Scenario` is the same on all ranks that make it from one seed.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from hybridengine.sync.adapter import Adapter
from hybridengine.sync.blocks import contiguous_strides
from hybridengine.sync.layout import Copy, EngineLayout, TensorSpec
from tests.sync.memory_engine import MemoryEngine, expected, shapes_of, values
from tests.sync.training import train

__all__ = ["SHAPES", "Scenario", "amend", "differing"]

# Blocks straddle parameters and shards at TP 1, 2 and 3. `one` has fewer rows than ranks; `copied`
# is part of two engine tensors; `first` and `second` are combined by the engine's loader.
SHAPES = shapes_of(
    column={"q": (132, 140), "k": (144, 140)},
    row={"out": (150, 276)},
    replicated={
        "copied": (140, 130),
        "extra": (100, 130),
        "one": (1, 140),
        "norm": (13, 3),
        "first": (7, 5),
        "second": (7, 5),
    },
)
_QUANTIZED = ("fused", "out", "joint", "one")
_ADAPTED = ("q", "k", "out", "copied", "one")


def amend(layout: EngineLayout) -> None:
    """Add what `fused_layout` has not: `joint`, `sum`, and a constant that copies overwrite."""
    rows = 0
    for name in ("copied", "extra"):
        shape = SHAPES[name][1]
        stride = contiguous_strides(shape)
        layout.copies.append(Copy(name, "joint", 0, rows * shape[1], shape, stride, stride))
        rows += shape[0]
    layout.destinations["joint"] = TensorSpec((rows, 130), (130, 1), torch.bfloat16)
    layout.destinations["sum"] = layout.destinations.pop("first")
    del layout.destinations["second"], layout.destinations["extra"]
    layout.fallback = dict.fromkeys(("first", "second"), "sum: computed by add")
    layout.by_loader = {"sum"}
    moved = {"first", "second", "extra"}
    layout.copies = [c for c in layout.copies if c.destination not in moved]
    norm = layout.destinations["norm"]
    layout.constants.append(("norm", 0, norm.shape, norm.stride, 0.0))


@dataclass
class Scenario:
    """A random model and engine, and the parameters as they are before each sync.

    options: of `build`, without those that only ranks of one world have.
    full: the full parameters, without adapters.
    adapters: parameter → adapter, replaced by `step`.
    """

    seed: int
    options: dict = field(init=False)
    frozen: frozenset[str] = field(init=False)
    full: dict[str, torch.Tensor] = field(init=False)
    adapters: dict[str, Adapter] = field(init=False)

    def __post_init__(self) -> None:
        self.random = draw = random.Random(self.seed)
        quantized = tuple(n for n in _QUANTIZED if draw.random() < 0.7) * (draw.random() < 0.7)
        is_on_dim1 = draw.random() < 0.5
        self.frozen = frozenset(n for n in SHAPES if draw.random() < draw.choice((0.2, 0.8)))
        adapted = [n for n in _ADAPTED if draw.random() < 0.5] * (draw.random() < 0.4)
        self.merge = draw.random() < 0.8 or bool(quantized)
        self.adapted = tuple(adapted)
        delta = draw.choice(("auto", "off") if quantized else ("on", "on", "auto", "off"))
        self.options = {
            "quantized": quantized,
            "rows_on_dim1": is_on_dim1,
            "delta": delta,
            "bucket_bytes": draw.choice((1 << 15, 1 << 17)),
        }
        self.full = values(SHAPES, seed=self.seed)
        for tensor in self.full.values():  # blocks have scales of their own
            tensor *= torch.exp2(torch.arange(len(tensor)) % 19.0)[:, None]
            tensor *= torch.exp2(torch.arange(tensor.shape[1]) // 40.0)
        self.adapters = {}
        self._train_adapters(0)

    @property
    def trained(self) -> set[str]:
        return set() if self.adapted else SHAPES.keys() - self.frozen

    def _train_adapters(self, step: int) -> None:
        for name in self.adapted:
            rows, columns = SHAPES[name][1]
            generator = torch.Generator().manual_seed(1000 * self.seed + step)
            left, right = (torch.randn(s, generator=generator) for s in ((rows, 2), (2, columns)))
            self.adapters[name] = Adapter(left, right, 2.0 ** self.random.randint(-2, 9))

    def step(self, step: int) -> tuple[str, bool]:
        """Change the parameters before a sync.

        Return what happens to the engine first, and whether the sync is verified.
        """
        draw = self.random
        share = draw.choice((0.0, 0.02, 0.9))
        changed = set(self.trained)
        if draw.random() < 0.2:
            changed |= {draw.choice(sorted(SHAPES))}  # a frozen one, too
        old = {name: self.full[name] for name in sorted(changed)}
        self.full |= train(old, share, 1000 * self.seed + step)
        if share:
            self._train_adapters(step)
        before = draw.choice(("nothing", "nothing", "nothing", "damage", "failure"))
        return before, draw.random() < 0.3

    @property
    def expected_parameters(self) -> Mapping[str, torch.Tensor]:
        """The full parameters that the engine's tensors are made of."""
        if not self.merge:
            return self.full
        full = dict(self.full)
        for name, adapter in self.adapters.items():
            update = adapter.scale * (adapter.left.double() @ adapter.right.double())
            full[name] = (full[name].double() + update).to(full[name].dtype)
        return full

    def damage(self, engine: MemoryEngine, step: int, ranks: int, rank: int) -> None:
        """Write to a tensor of one of so many engine ranks, behind the back of the syncs."""
        draw = random.Random(f"{self.seed}/{step}")  # trainers have no engine to draw from
        name = draw.choice(sorted(engine.tensors))
        if draw.randrange(ranks) == rank:
            engine.tensors[name].view(torch.uint8).view(-1)[::3] ^= 5


def differing(engine: MemoryEngine, scenario: Scenario, version: int) -> list[str]:
    """The tensors of an engine that are not what its layout makes of the parameters, bit by bit."""
    made = expected(engine, scenario.expected_parameters)
    assert made.keys() == engine.tensors.keys()
    bits = {name: tensor.view(torch.uint8) for name, tensor in engine.tensors.items()}
    wrong = [
        name
        for name, tensor in made.items()
        if not torch.equal(tensor.view(torch.uint8), bits[name])
    ]
    if not scenario.merge:
        for name, adapter in scenario.adapters.items():
            held = engine.adapters[version][name]
            equal = torch.equal(held.left, adapter.left) and torch.equal(held.right, adapter.right)
            wrong += [] if equal and held.scale == adapter.scale else [f"adapter of {name}"]
    return wrong
