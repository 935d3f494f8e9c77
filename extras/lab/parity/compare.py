"""The comparison of a trained model and an engine: tokens, weights, operators, log-probs."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hybridengine.engine.vllm.weights import record_engine_layout
from hybridengine.kernels import decode_linear
from hybridengine.kernels.logprob.soft_cap import soft_cap_
from hybridengine.lab.parity.causes import (
    Case,
    Sampling,
    cause_of,
    response_log_probs,
    sampling_cause,
)
from hybridengine.lab.parity.forced import ForcedForward
from hybridengine.lab.parity.points import (
    LOGITS,
    EngineRecord,
    TrainedWeights,
    WeightFault,
    engine_model,
    find_weight_faults,
    record_engine,
    tied_head_faults,
)
from hybridengine.model import pack_rollouts, packed_log_probs, packed_logits
from hybridengine.model.attention import ATTENTION
from hybridengine.model.exact import has_exact_operators
from hybridengine.model.forward import packed_head
from hybridengine.model.head import accepts_head_function
from hybridengine.model.parameters import checkpoint_layout_from_config
from hybridengine.run.config.rl import RolloutCorrectionConfig
from hybridengine.sync.layout import EngineLayout

# The largest relative difference of a token that rounding explains, by the engine's dtype.
_ROUNDING = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}
_QUANTIZED = 0.15  # of an engine with FP8 weights, and inputs
TOKENS, SAMPLING = "tokens", "sampling"
REPORT = "parity.json"  # in a run's folder, for `hybridengine diagnose`


@dataclass(frozen=True)
class Finding:
    """Where the engine differs first.

    point: TOKENS, SAMPLING, or the trained model's name of the module or operator.
    difference: the largest difference of a token's values, relative to their norm; at SAMPLING the
      largest difference of two log-probs.
    cause: the likely cause, as a clause.
    """

    point: str
    difference: float
    cause: str


@dataclass(frozen=True)
class Report:
    """What a comparison found.

    finding: None where nothing differs beyond rounding.
    weights: all parameters whose values differ.
    differences: by point, the largest relative difference of a token, in the order of computation.
    log_prob_difference, probability_difference: largest over all sampled tokens, of the log-probs
      that the engine returned and those of an ordinary forward pass of the trained model.
    kl: of the engine from the trained model, nats per token, estimated by k3 over those tokens.
    largest_ratio: of the trained model's probability to the engine's.
    num_tokens: how many tokens were sampled.
    has_cached_prefix: whether the engine took keys and values of a prompt from its prefix cache.
    """

    finding: Finding | None
    weights: Sequence[WeightFault] = ()
    differences: Mapping[str, float] = field(default_factory=dict)
    log_prob_difference: float = 0.0
    probability_difference: float = 0.0
    kl: float = 0.0
    largest_ratio: float = 1.0
    num_tokens: int = 0
    has_cached_prefix: bool = False

    @property
    def first_inexact(self) -> tuple[str, float] | None:
        """The first point that is not equal bit for bit, and its difference; None: all are."""
        return next(((point, x) for point, x in self.differences.items() if x > 0), None)

    @property
    def correction(self) -> str:
        """What keeps the expected gradient right in spite of this engine; docs/algorithms.md."""
        bound = RolloutCorrectionConfig().is_bounds[1]
        if self.finding is not None and self.finding.point in (TOKENS, SAMPLING):
            return "none holds: the log-probs are of other tokens, or not of what is sampled"
        if self.finding is None and self.first_inexact is None:
            return "none is needed: every operator is equal bit for bit"
        if self.largest_ratio <= bound:
            return f"weights by token hold: every ratio is below their bound of {bound:g}"
        return (
            f"weights by token with score centering: ratios exceed the bound of {bound:g}, and "
            "truncated weights alone leave a drift"
        )

    def write(self, folder: Path) -> None:
        """Write it to a run's folder."""
        found = {"finding": self.finding and asdict(self.finding), "correction": self.correction}
        names = "first_inexact", "probability_difference", "kl", "largest_ratio", "num_tokens"
        found |= {name: getattr(self, name) for name in names}
        (folder / REPORT).write_text(json.dumps(found, indent=2) + "\n")

    def __str__(self) -> str:
        finding, size = self.finding, f"differ by up to {self.probability_difference:.1e}"
        if finding is None:
            lines = [
                "trained model and engine agree at all "
                f"{len(self.differences)} points within rounding; probabilities of sampled tokens "
                f"{size}"
            ]
        else:
            lines = [
                f"first difference: {finding.point}, {finding.difference:.1e}: {finding.cause}",
                f"probabilities of sampled tokens {size}",
            ]
        if self.first_inexact is not None:
            point, difference = self.first_inexact
            lines.append(f"first point that is not equal bit for bit: {point}, {difference:.1e}")
        if self.num_tokens:
            lines.append(
                f"over {self.num_tokens} tokens: KL {self.kl:.1e} nats per token, largest ratio "
                f"{self.largest_ratio:.4g}; correction: {self.correction}"
            )
        lines += [f"weight {w.parameter} in {w.tensor}: {w.cause}" for w in self.weights]
        return "\n".join(lines)


class Parity:
    """A trained model and a vLLM engine in the same process.

    model: a Hugging Face model whose parameters are all on this rank, sharded by FSDP2 or not. With
      `use_exact_operators` it is compared bit for bit: nothing is left to rounding.
    llm: `vllm.LLM` with `enforce_eager=True` and tensor-parallel size 1.
    layout, tensors: how the engine's tensors derive from the model's; None: recorded from vLLM's
      own loader.
    """

    def __init__(
        self,
        model: nn.Module,
        llm: Any,
        *,
        layout: EngineLayout | None = None,
        tensors: Callable[[], Mapping[str, Tensor]] | None = None,
    ) -> None:
        self.model, self.llm = model, llm
        config = llm.llm_engine.vllm_config
        if (size := config.parallel_config.tensor_parallel_size) > 1:
            raise ValueError(
                f"the engine's tensor_parallel_size is {size}, and its operators are compared as "
                "wholes; compare with an engine of size 1"
            )
        if not config.model_config.enforce_eager:
            raise ValueError("the engine runs compiled graphs; build it with enforce_eager=True")
        if any(isinstance(p, DTensor) and p.device_mesh.size() > 1 for p in model.parameters()):
            raise ValueError(
                "the model is sharded over several ranks, whose engines may differ; compare a "
                "model that is on one rank"
            )
        self._dtype: torch.dtype = config.model_config.dtype
        self._is_exact = has_exact_operators(model)
        self._config: Any = model.config.get_text_config()  # type: ignore[operator, union-attr]
        self._engine_model = engine_model(llm)
        self._layout = layout or _recorded_layout(config, model.config)
        self._tensors = tensors or self._named_tensors

    def _named_tensors(self) -> dict[str, Tensor]:
        named = dict(self._engine_model.named_parameters()) | dict(
            self._engine_model.named_buffers()
        )
        return {name: tensor.detach() for name, tensor in named.items()}

    def compare(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        engine_prompts: Sequence[Sequence[int]] | None = None,
        max_tokens: int = 16,
        temperature: float = 1.0,
        top_p: float = 1.0,
        top_k: int = 0,
        min_p: float = 0.0,
        seed: int = 0,
    ) -> Report:
        """Generate a response to each of `prompts`, and compare all that led to it.

        prompts: token ids, as the trainer renders them.
        engine_prompts: the token ids that the engine makes of the same chats by its own template;
          None: it is given those of the trainer.
        """
        from vllm import SamplingParams

        for number, (ours, theirs) in enumerate(
            zip(prompts, engine_prompts or prompts, strict=True)
        ):
            if (cause := token_cause(ours, theirs)) is not None:
                return Report(Finding(TOKENS, 1.0, f"prompt {number}: {cause}"))
        weights, tensors = TrainedWeights(self.model), self._tensors()
        faults = [
            *find_weight_faults(weights, self._layout, tensors),
            *tied_head_faults(weights, tensors),
        ]
        sampling = Sampling(temperature, top_p, top_k, min_p)
        options: Any = {"logprobs": 0, "ignore_eos": True, "detokenize": False, "seed": seed}
        params = SamplingParams(max_tokens=max_tokens, **options, **sampling._asdict())
        report = self._compare(prompts, params, sampling, faults)
        finding = report.finding
        if report.has_cached_prefix and finding is not None and ".attention" in finding.point:
            self.llm.reset_prefix_cache()
            fresh = self._compare(prompts, params, sampling, faults)
            if fresh.finding is not None:
                return fresh
            cause = (
                "right without the cached prefix, whose keys and values are of other weights: the "
                "prefix cache must be dropped after each sync"
            )
            return replace(report, finding=replace(finding, cause=cause))
        return report

    def _compare(
        self,
        prompts: Sequence[Sequence[int]],
        params: Any,
        sampling: Sampling,
        faults: Sequence[WeightFault],
    ) -> Report:
        record_kept = self._is_exact and bool(sampling.truncation)
        forced = [
            ForcedForward(
                self.model,
                record_engine(self.llm, ids, params, record_kept=record_kept),
                _forward,
            )
            for ids in prompts
        ]
        records = [ours.record for ours in forced]
        differences = self._differences(records, forced)
        finding = self._finding(records, forced, differences, faults, sampling)
        pairs = [self._log_probs(record, sampling) for record in records]
        ours, theirs = (torch.cat(x) for x in zip(*pairs, strict=True))
        log_ratios = ours - theirs
        return Report(
            finding,
            faults,
            differences,
            float(log_ratios.abs().max()),
            float((ours.exp() - theirs.exp()).abs().max()),
            float((log_ratios.expm1() - log_ratios).mean()),
            float(log_ratios.max().exp()),
            log_ratios.numel(),
            has_cached_prefix=any(record.positions[0] > 0 for record in records),
        )

    def _differences(
        self, records: Sequence[EngineRecord], forced: Sequence[ForcedForward]
    ) -> dict[str, float]:
        largest = dict[str, float]()
        for record, ours in zip(records, forced, strict=True):
            for point, theirs in record.points.items():
                if point in ours.points:
                    a, b = (x.flatten(1).double().cpu() for x in (theirs, ours.points[point]))
                    rows = (a - b).norm(dim=1) / b.norm(dim=1).clamp(min=1e-12)
                    largest[point] = max(largest.get(point, 0.0), float(rows.max()))
        return largest

    def _finding(
        self,
        records: Sequence[EngineRecord],
        forced: Sequence[ForcedForward],
        differences: Mapping[str, float],
        faults: Sequence[WeightFault],
        sampling: Sampling,
    ) -> Finding | None:
        wrong = {fault.point: fault for fault in faults}
        for point, difference in differences.items():
            if point in wrong:
                return Finding(point, difference, f"weight of {point}: {wrong[point].cause}")
            limit = _QUANTIZED if self._layout.quantized else _ROUNDING[self._dtype]
            if point == LOGITS:
                limit = _ROUNDING[torch.float32]
            if self._is_exact:
                limit = 0.0
            if difference > limit:
                return Finding(point, difference, self._cause(point, records, forced, faults))
        if faults:  # of a point that is no module of the trained model
            return Finding(faults[0].point, 0.0, f"weight: {faults[0].cause}")
        for record in records:
            cause = sampling_cause(record, sampling)
            ours, theirs = self._log_probs(record, sampling)
            difference = float((ours - theirs).abs().max())
            if cause is None and self._is_exact and difference > 0:
                cause = "its log-probs are rounded otherwise than the trained model's"
            if cause is not None:
                return Finding(SAMPLING, difference, cause)
        return None

    def _cause(
        self,
        point: str,
        records: Sequence[EngineRecord],
        forced: Sequence[ForcedForward],
        faults: Sequence[WeightFault],
    ) -> str:
        if fault := next((f for f in faults if f"{f.point}.".startswith(f"{point}.")), None):
            return f"weight {fault.parameter}: {fault.cause}"
        pairs = [
            Case(point, record, ours, self._config)
            for record, ours in zip(records, forced, strict=True)
        ]
        return cause_of(max(pairs, key=lambda c: float((c.theirs - c.ours).norm())))

    def _log_probs(self, record: EngineRecord, sampling: Sampling) -> tuple[Tensor, Tensor]:
        """Return the log-probs of the response, of the trained model and of the engine."""
        device = next(self.model.parameters()).device
        if self._is_exact:
            start, ids = record.num_prompt, record.token_ids
            parts = {} if record.kept is None else {"kept": record.kept}
            batch = pack_rollouts([(ids[:start], ids[start:])], device, parts=parts)
            with torch.no_grad():
                ours = packed_log_probs(self.model, batch, sampling.temperature)[0].double()
        else:
            tokens = torch.tensor(record.token_ids[:-1], device=device)
            with torch.no_grad():
                logits = _forward(self.model, tokens)[record.num_prompt - 1 :].double()
            ours = response_log_probs(record, logits, sampling)
        return ours.cpu(), torch.tensor(record.log_probs, dtype=torch.float64)


def attach(model: nn.Module, llm: Any) -> Parity:
    """Return the comparison of any trainer's model with its `vllm.LLM` in the same process.

    Examples:
        report = hybridengine.lab.parity.attach(model, llm).compare([tokenizer.encode("Hello")])
        print(report)
    """
    return Parity(model, llm)


def _recorded_layout(config: Any, trained: Any) -> EngineLayout:
    """Return the layout of any vLLM engine.

    Without experts, which vLLM may keep in another order: they are compared by their results.
    """
    checkpoint = checkpoint_layout_from_config(trained)
    layout = record_engine_layout(config, checkpoint, config.model_config.dtype)
    copies = [copy for copy in layout.copies if ".experts." not in copy.destination]
    return replace(layout, copies=copies)


def token_cause(ours: Sequence[int], theirs: Sequence[int]) -> str | None:
    """Return how the tokens of a prompt differ; None where they do not."""
    if list(ours) == list(theirs):
        return None
    common = next(
        (i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b),
        min(len(ours), len(theirs)),
    )
    if list(ours) == list(theirs[1:]) or list(theirs) == list(ours[1:]):
        side = "engine" if len(theirs) > len(ours) else "trainer"
        return f"only the {side} puts a token before it (begin of sequence)"
    return (
        f"the chat templates or tokenizers differ: the trainer has {len(ours)} tokens, the engine "
        f"{len(theirs)}, equal up to position {common}"
    )


def _forward(model: nn.Module, token_ids: Tensor) -> Tensor:
    """Return the logits [T, V] of one sequence."""
    if model.config._attn_implementation != ATTENTION:  # type: ignore[union-attr]
        logits: Tensor = model(input_ids=token_ids.unsqueeze(0), use_cache=False).logits[0]
        return logits
    ids = [*token_ids.tolist(), 0]  # every position predicts one
    batch = pack_rollouts([(ids[:1], ids[1:])], token_ids.device)
    if has_exact_operators(model) and accepts_head_function(model):
        logits, *_ = packed_head(model, batch, _exact_head)
        return logits
    return packed_logits(model, batch)


def _exact_head(
    rows: Tensor, weight: Tensor, *, bias: Tensor | None, logit_scale: float, softcap: float | None
) -> tuple[Tensor]:
    """Return the logits (`HeadFunction`) that `packed_log_probs` computes with exact operators."""
    logits = decode_linear(rows, weight, bias, out_dtype=torch.float32)
    return (soft_cap_(logits * logit_scale, softcap),)
