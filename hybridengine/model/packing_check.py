"""Check numerically that a model computes packed sequences as it computes each of them alone.

A model whose attention drops an argument leaks between packed sequences without an error, and one
with a window that only transformers' mask contains computes without it. No list of types finds that
in a model's own code, so the code is run: a small copy (`hybridengine.model.probe`) computes two
sequences packed, with our attention, and each alone, with transformers' eager attention and masks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PretrainedConfig

from hybridengine.kernels import pack_forest, pack_sequences
from hybridengine.kernels._backend import requested_backend
from hybridengine.model.forward import packed_logits
from hybridengine.model.packed import pack_batch
from hybridengine.model.probe import Probe, Trace
from hybridengine.model.validation import is_own_code, packing_obstacle
from hybridengine.run.errors import ModelError, reason_of

# Differences are relative to the largest value of a module's output. Another order of sums changes
# some 1e-6 of it in float32, which grows from layer to layer; an attention that leaks changes more
# than 0.3 at once. Measured on the default configuration of every text type of transformers.
_ROUNDING, _JUMP = 3e-4, 30
# Rounding changes the choice of a router where two experts are equally good, but hardly so with
# each of several weights.
_DRAWS = 3
# Tokens of the two sequences. The longer one exceeds the short lengths of a `Probe`.
_PREFIX, _SUFFIXES = 6, (5, 19)


class Outcome(NamedTuple):
    """What is wrong with packed sequences, and with shared prefixes; None: nothing."""

    packed: str | None = None
    shared: str | None = None


OUTCOMES: dict[str, Outcome] = {}


def check_packing(path: str, config: PretrainedConfig, trust_remote_code: bool = False) -> None:
    """Check that the model of `config` computes packed sequences as it computes each alone.

    path: of the model, for messages.

    Raises:
        ModelError: it does not, or its forward fails; the message names the layer.
    """
    if fault := _outcome(config, trust_remote_code).packed:
        raise ModelError(f"model {path!r} ({config.model_type}) cannot run packed: {fault}")


def shared_prefix_obstacle(config: PretrainedConfig, trust_remote_code: bool = False) -> str | None:
    """Return why sequences cannot share the computation of a prefix; None if they can.

    They can where a token's layers read other tokens only through AttentionInterface. Layers that
    carry a state along the sequence, and attention over chunks of positions, read the packed order.
    """
    if is_own_code(config, trust_remote_code):
        return f"its own code ({config.model_type}) may read the sequence in packed order"
    if obstacle := packing_obstacle(config, trust_remote_code):
        return obstacle
    outcome = _outcome(config, trust_remote_code)
    return outcome.packed or outcome.shared


def _outcome(config: PretrainedConfig, trust_remote_code: bool) -> Outcome:
    """Return the outcome of the comparison, made once per configuration and process."""
    if is_own_code(config, trust_remote_code):  # which may change between two calls
        return _compare(config, trust_remote_code)
    key = f"{type(config).__name__} {config.to_json_string(use_diff=False)}"
    if key not in OUTCOMES:
        OUTCOMES[key] = _compare(config, trust_remote_code)
    return OUTCOMES[key]


def _compare(config: PretrainedConfig, trust_remote_code: bool) -> Outcome:
    outcome = Outcome()
    with (
        requested_backend(None),  # the one of the environment can lack a CPU
        torch.no_grad(),
        torch.device("cpu"),
        torch.random.fork_rng(devices=[]),
        torch.autocast("cpu", enabled=False),
    ):
        try:
            probe = Probe(config, trust_remote_code)
            for seed in range(_DRAWS):
                if seed:
                    probe.draw(seed)
                outcome = find_faults(probe, seed)
                if outcome == Outcome():
                    break
        except ModelError as error:
            return Outcome(str(error))
    return outcome


def find_faults(probe: Probe, seed: int) -> Outcome:
    generator = torch.Generator().manual_seed(seed)
    choice = torch.randint(len(probe.token_ids), (_PREFIX + sum(_SUFFIXES),), generator=generator)
    prefix, *ends = torch.tensor(probe.token_ids)[choice].split([_PREFIX, *_SUFFIXES])
    sequences = [torch.cat([prefix, end]) for end in ends]
    alone = [probe.alone(ids) for ids in sequences]

    def fault(order: list[int], shared_prefix: bool = False) -> str | None:
        parts = [sequences[i] for i in order]
        return _difference(probe, parts, [alone[i] for i in order], shared_prefix)

    if found := fault([1]):
        return Outcome(
            f"{found} from transformers' own attention: positions or a mask of its own (a sliding "
            "window?) or an argument does not reach AttentionInterface. If no sequence is longer "
            "than the window, set it to null in config.json; otherwise use another model"
        )
    for order in ([0, 1], [1, 0]):
        if found := fault(order):
            return Outcome(
                f"{found} in a batch with another sequence: it depends on the batch, or its "
                "attention does not pass cu_seq_lens_q and the other keyword arguments on to "
                "AttentionInterface. Mend its code, or use transformers' implementation or another "
                "model"
            )
    try:
        shared = fault([0, 1], shared_prefix=True)
    except ModelError as error:
        return Outcome(None, str(error))
    return Outcome(None, shared and f"{shared} where sequences share a prefix")


def _difference(
    probe: Probe, sequences: Sequence[Tensor], alone: Sequence[Trace], shared_prefix: bool
) -> str | None:
    """Return where packed `sequences` differ from each `alone`; None: nowhere."""
    ids = [sequence.tolist() for sequence in sequences]
    given = [[*x, 0] for x in ids] if shared_prefix else ids  # the last token is not packed then
    masks = [[0] + [1] * (len(x) - 1) for x in given]
    batch = pack_batch(given, masks, shared_prefix=shared_prefix)
    flat = pack_sequences(ids)
    index = torch.arange(len(flat.values[0]))
    if shared_prefix:
        index = pack_forest(flat.values[0], flat.cu_seqlens).token_index
    try:
        packed = probe.trace(lambda: packed_logits(probe.model, batch))
    except ModelError:
        raise
    except Exception as error:
        reason = f"{type(error).__name__}: {reason_of(error)}"
        raise ModelError(f"its packed forward fails ({reason})") from error
    tokens = index.split([len(x) for x in ids])
    if found := _first_difference(packed, alone, tokens, len(batch.input_ids)):
        name, by = found
        what = f"{name} ({type(probe.model.get_submodule(name)).__name__})" if name else "it"
        return f"{what} computes values that differ by {by:.0%}"
    return None


def _first_difference(
    packed: Trace, alone: Sequence[Trace], tokens: Sequence[Tensor], num_tokens: int
) -> tuple[str, float] | None:
    """Return the module of the first calls that differ, and by how much; None: they do not.

    packed: of the packed row, [num_tokens].
    alone: of each of its sequences.
    tokens: of each sequence the indices of its tokens in the packed row.
    """

    def difference(key: tuple[str, int], part: str) -> float:
        x = _rows(getattr(packed.calls[key], part), num_tokens)
        expected = [
            _rows(getattr(trace.calls[key], part), len(index)) if key in trace.calls else None
            for trace, index in zip(alone, tokens, strict=True)
        ]
        if x is None:
            return 0.0
        pairs = zip(tokens, expected, strict=True)
        return max((_distance(x[i], y) for i, y in pairs if y is not None), default=0.0)

    keys, largest = list(packed.calls), _ROUNDING
    for i, (name, _) in enumerate(keys):
        by, limit = difference(keys[i], "output"), _JUMP * largest
        if by > limit:
            # The cause may be outside of modules, in the innermost one with equal inputs.
            for outer in keys[i:]:
                prefix = f"{outer[0]}." if outer[0] else ""
                if f"{name}.".startswith(prefix) and difference(outer, "input") <= limit:
                    return outer[0], by
        largest = max(largest, by)
    has_all = len(packed.result) == sum(map(len, tokens))  # also the rows of last tokens
    results = [trace.result if has_all else trace.result[:-1] for trace in alone]
    of_result = _distance(packed.result, torch.cat(results))
    return ("", of_result) if of_result > _JUMP * largest else None


def _rows(x: Tensor | None, num_tokens: int) -> Tensor | None:
    """Return floats of `num_tokens` tokens as [num_tokens, ...]; None if they are not such."""
    if x is None or not x.is_floating_point():
        return None
    if x.shape[:2] == (1, num_tokens):
        return x[0]
    return x if x.shape[:1] == (num_tokens,) else None


def _distance(x: Tensor, expected: Tensor) -> float:
    """Return the largest difference, relative to the largest value."""
    largest = float(expected.abs().max())
    return float((x - expected).abs().max()) / largest if largest else 0.0
