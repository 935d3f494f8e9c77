"""How vLLM samples here: by `sample_tokens`, with a seed for each request, and what it records.

vLLM's first model runner sorts the vocabulary for top-p, writes the processed log-probs of all
entries and gathers one of them. Here its `Sampler` gets a forward that does the same for requests
that want the log-prob of the sampled token alone, as all of ours do: one read of the logits, and a
part of a second. Random numbers are those of vLLM's own sampler there: one of 31 bits for each
token, of the request's generator. The second model runner, which GPUs have, has another sampler
(`FusedSecondSampler`).

A request without a seed draws one from NumPy's global state in vLLM's second model runner, in
which the ranks of a replica may differ. With seeds a sample depends on its request alone: neither
on other code that draws numbers, nor on what else is in the batch.

The vocabulary entries that top-k and top-p kept are recorded on request. vLLM's second model runner
returns them (`return_sampling_mask`), but as a setting of the engine, which then refuses greedy
requests and top-p without top-k; here it is on during one call. The first runner does not; there
our sampler returns them. With both, vLLM's scheduler assigns the rows of a step to requests,
through preemption, chunked prefill and stops, as it assigns log-probs, and
`CompletionOutput.sampling_mask` is the result.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn.functional import pad

from hybridengine.engine.response import token_ranks
from hybridengine.kernels import sample_tokens, token_log_probs
from hybridengine.kernels.sampling import likely_log_probs
from hybridengine.kernels.sparse_linear import kept_log_probs
from hybridengine.run import plugins

if TYPE_CHECKING:
    from vllm.v1.worker.gpu.sample.sampler import Sampler as _SecondSampler
else:  # not imported before `prepare_environment`; see `fuse_sampler`
    _SecondSampler = object

_MASKS = "return_sampling_mask"


class FusedSampler:
    """The forward of the sampler of `runner`, vLLM's first model runner, from now on.

    What it does not cover, vLLM's own forward does: other log-probs than the processed ones of the
    sampled and the most likely tokens, and logits processors that apply to random sampling only,
    but for min-p.

    exact: log-probs are those of `kept_log_probs`, as the trained model computes them.
    ranks: whether the ranks of tokens among all are counted, or 0.

    Attributes:
        records: whether `masks` are kept.
        masks: of the newest step: the ids that were kept as vLLM's `SamplingMaskLists`; a row from
            which nothing was cut has none.
    """

    def __init__(self, runner: Any, exact: bool = False, ranks: bool = False) -> None:
        self._runner, self._sampler = runner, runner.sampler
        self._forward = self._sampler.forward
        self._sampler.forward = self.forward
        self._exact, self._ranks = exact, ranks
        self.records = False
        self.masks: Any = None

    @staticmethod
    def of(runner: Any) -> FusedSampler | None:
        """Return the one of a runner, None where it has vLLM's own sampler."""
        fused = getattr(getattr(runner.sampler, "forward", None), "__self__", None)
        return fused if isinstance(fused, FusedSampler) else None

    @contextmanager
    def recording(self) -> Iterator[None]:
        """While open, the outputs of the runner have `sampling_masks`, one row per request."""
        sample_tokens = self._runner.sample_tokens

        def recording_sample_tokens(*args: Any) -> Any:
            output = sample_tokens(*args)
            masks, self.masks = self.masks, None
            if masks is not None:
                # With asynchronous scheduling the output is filled in when its copies are done.
                getattr(output, "_model_runner_output", output).sampling_masks = masks
            return output

        recorded = patch.object(self._runner, "sample_tokens", recording_sample_tokens)
        with patch.object(self, "records", True), recorded:
            yield

    def forward(
        self,
        logits: Tensor,
        sampling_metadata: Any,
        predict_bonus_token: bool = False,
        logprobs_mode_override: str | None = None,
    ) -> Any:
        """Return vLLM's `SamplerOutput` for logits [B, V]."""
        from vllm.v1.outputs import SamplerOutput

        metadata = sampling_metadata
        if logprobs_mode_override is not None or not self.covers(metadata):
            return self._forward(logits, metadata, predict_bonus_token, logprobs_mode_override)
        process = self._sampler.apply_logits_processors
        logits = process(logits.float(), metadata, predict_bonus_token)
        seeds = draw_seeds(metadata.generators, logits)
        tokens, log_probs = self.sample(logits, seeds, metadata, _min_p(metadata))
        return SamplerOutput(sampled_token_ids=tokens, logprobs_tensors=log_probs)

    def sample(
        self, logits: Tensor, seeds: Tensor, metadata: Any, min_p: float | Tensor = 0.0
    ) -> tuple[Tensor, Any]:
        """Return the tokens int32 [B, 1] of logits [B, V], and `LogprobsTensors` or None.

        metadata: vLLM's `SamplingMetadata`, with temperature, top-k and top-p of each row.
        """
        from vllm.v1.outputs import LogprobsTensors, SamplingMaskLists

        sampled = sample_tokens(
            logits,
            seeds,
            torch.zeros(logits.shape[0], dtype=torch.int64, device=logits.device),
            temperature=0.0 if metadata.temperature is None else metadata.temperature,
            top_k=0 if metadata.top_k is None else metadata.top_k,
            top_p=1.0 if metadata.top_p is None else metadata.top_p,
            min_p=min_p,
            return_kept_ids=self.records or (self._exact and logits.is_cpu),
        )
        if self.records and sampled.kept_ids is not None:
            ends = pad(sampled.num_kept.cumsum(0), (1, 0))
            self.masks = SamplingMaskLists(sampled.kept_ids.cpu().numpy(), ends.cpu().numpy())
        tokens = sampled.tokens.int().unsqueeze(1)
        if metadata.max_num_logprobs is None:
            return tokens, None
        drawn = sampled.tokens
        ranks = token_ranks(logits, drawn) if self._ranks else torch.zeros_like(drawn)
        values = sampled.log_probs
        if self._exact and metadata.all_random:
            if logits.is_cpu:
                values = kept_log_probs(logits, sampled, metadata.temperature)
            else:  # where jobs truncate, they are not exact; nothing is waited for
                uncut, _ = token_log_probs(logits, drawn, metadata.temperature)
                values = torch.where(sampled.num_kept == 0, uncut, values)
        ids, values = tokens, values.unsqueeze(1)
        if count := metadata.max_num_logprobs:
            ids, values = likely_log_probs(logits, sampled, values, metadata.temperature, count)
        return tokens, LogprobsTensors(ids, values, ranks)

    def covers(self, metadata: Any) -> bool:
        """Return whether requests want what this forward computes."""
        from vllm.v1.sample.logits_processor import MinPLogitsProcessor

        return (
            self._sampler.logprobs_mode == "processed_logprobs"
            and not metadata.logprob_token_ids
            and all(
                isinstance(processor, MinPLogitsProcessor)
                for processor in metadata.logitsprocs.argmax_invariant
            )
        )


def _min_p(metadata: Any) -> float | Tensor:
    """Return min-p of the rows, float32 [B], or 0: of vLLM's processor, its only one here."""
    processors = metadata.logitsprocs.argmax_invariant
    return next((x.min_p.squeeze(1) for x in processors if x.min_p_count), 0.0)


def draw_seeds(generators: dict[int, torch.Generator], logits: Tensor) -> Tensor:
    """Draw a seed for each row, int64 [B]; rows without a generator take torch's own.

    A launch for each generator, which has its state on the device, and none besides where every
    row has one.
    """
    seeds = torch.empty(logits.shape[0], dtype=torch.int64, device=logits.device)
    if len(generators) < len(seeds):
        seeds.random_(0, 2**31)
    for row, generator in generators.items():
        seeds[row : row + 1].random_(0, 2**31, generator=generator)
    return seeds


class FusedSecondSampler(_SecondSampler):
    """In front of vLLM's second `Sampler`: another draw, where only sampled tokens have log-probs.

    vLLM applies logits processors, temperature and min-p; the draw, top-k, top-p and the log-prob
    of the token are one read of the logits and a part of a second, in place of a sort, a draw of
    noise and a softmax of the vocabulary. The key of a draw is vLLM's: seed and position.

    Recorded sampling masks, replayed traces, several logits for a request and other log-probs are
    vLLM's own.
    """

    # Log-probs are those of `token_log_probs`, as the trained model computes them, in steps where
    # every request is sampled at a temperature, without other changes of logits.
    is_exact = False
    _is_fused = False  # in the call that runs
    _log_probs: Any = None  # `LogprobsTensors`

    def __call__(self, logits: Tensor, input_batch: Any) -> Any:
        """Return vLLM's `SamplerOutput` for logits [B, V]."""
        rows = input_batch.idx_mapping_np
        wanted = self.get_logprobs_dims(rows)
        self._is_fused = (
            wanted in (None, (0, 0))
            and (wanted is None or self.logprobs_mode == "processed_logprobs")
            and not self.return_sampling_mask
            and self.trace_replay_state is None
            and logits.shape[0] == len(rows)
        )
        try:
            output = super().__call__(logits, input_batch)
        finally:
            log_probs, self._log_probs, self._is_fused = self._log_probs, None, False
        if wanted is not None and log_probs is not None:
            output.logprobs_tensors = log_probs
        return output

    def get_logprobs_dims(self, *args: Any, **kwargs: Any) -> tuple[int, int] | None:
        """Return what vLLM has to compute itself."""
        return None if self._is_fused else super().get_logprobs_dims(*args, **kwargs)

    def sample(self, logits: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if not self._is_fused:
            return super().sample(logits, *args, **kwargs)
        from vllm.v1.outputs import LogprobsTensors

        states, (mapping, _, rows, positions, *_) = self.sampling_states, args
        skip: Any = {"skip_top_k_top_p": True}
        given, logits = logits, self.apply_sampling_params(logits, *args, **skip)
        top_k, top_p = states.get_top_k_top_p(mapping, rows)
        sampled = sample_tokens(
            logits,
            states.seeds.gpu[mapping],
            positions.long(),
            temperature=(states.temperature.gpu[mapping] > 0).float(),  # is applied: 1 or greedy
            top_k=0 if top_k is None else top_k,
            top_p=1.0 if top_p is None else top_p,
        )
        tokens, log_probs = sampled.tokens, sampled.log_probs
        if self.is_exact and not states.any_greedy(rows):
            log_probs, _ = token_log_probs(given.float(), tokens, states.temperature.gpu[mapping])
        ids, ranks = tokens.unsqueeze(1).to(torch.int32), token_ranks(logits, tokens)
        self._log_probs = LogprobsTensors(ids, log_probs.unsqueeze(1), ranks)
        return tokens, logits


def fuse_sampler(runner: Any, exact: bool = False, ranks: bool = False) -> None:
    """Let a model runner of vLLM, of either kind, sample by `sample_tokens` where it is covered.

    exact, ranks: of a `FusedSampler`; the second kind always counts ranks.
    """
    from vllm.v1.sample.sampler import Sampler

    sampler = getattr(runner, "sampler", None)
    if isinstance(sampler, Sampler):
        fused = FusedSampler(runner, exact, ranks)
        if (drafting := runner.speculative_config) and drafting.method in plugins("drafts"):
            plugins("drafts")[drafting.method].load().use_sampler(runner, fused)
    elif hasattr(sampler, "sampling_states"):
        from vllm.v1.worker.gpu.sample import sampler as second

        if type(sampler) is second.Sampler:
            bases = FusedSecondSampler, second.Sampler
            sampler.__class__ = type("FusedSecondSampler", bases, {"is_exact": exact})


@contextmanager
def record_kept_ids(llm: Any, runner: Any) -> Iterator[None]:
    """While open, completions of `llm` have a `sampling_mask`.

    llm: a `vllm.LLM` whose scheduler is in this process. Its requests must sample (temperature
    above 0) and return the log-prob of the sampled token alone.
    runner: its model runner, after `fuse_sampler`.
    """
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    fused = FusedSampler.of(runner)
    recording = fused.recording() if fused else patch.object(runner.sampler, _MASKS, True)
    with patch.object(scheduler, _MASKS, True), recording:
        yield


def seeded(sampling: Any, seeds: Sequence[int]) -> list[Any]:
    """Return a copy of `SamplingParams` for each seed. vLLM adds a sample's index to its seed."""
    copies = [copy.copy(sampling) for _ in seeds]
    for params, seed in zip(copies, seeds, strict=True):
        params.seed = seed
    return copies


def request_generators() -> AbstractContextManager:
    """While open, vLLM's first model runner can make generators for requests on a CPU."""
    if torch.cuda.is_available():
        return nullcontext()
    return patch.object(torch, "Generator", _CpuGenerator)


class _CpuGenerator(torch.Generator):
    """A generator with what vLLM calls to take back a draw.

    It takes back the number that it drew while the prompt was still incomplete. Generators of a CPU
    have no offset; here the first number can be taken back. After a preemption, when others were
    drawn before, the number stays used.
    """

    def get_offset(self) -> int:
        return 0

    def set_offset(self, offset: int) -> torch.Generator:
        once = torch._C.Generator().manual_seed(self.initial_seed())
        torch.randint(0, 2**31, (1,), generator=once)
        if torch.equal(once.get_state(), self.get_state()):
            self.manual_seed(self.initial_seed())
        return self
