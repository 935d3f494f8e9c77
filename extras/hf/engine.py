"""Hugging Face `generate` behind the rollout interface, for machines without vLLM.

Each rank holds one full model (tensor-parallel size 1), which the reshard writes as in any engine.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.utils.rnn import pad_sequence
from transformers import (
    GenerationMixin,
    LogitsProcessor,
    LogitsProcessorList,
    MinPLogitsWarper,
    StoppingCriteria,
    StoppingCriteriaList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from hybridengine.engine.interface import (
    EngineOptions,
    Prompt,
    Request,
    RequestStream,
    RolloutEngine,
    SamplingSpec,
    derive_seed,
    local_random_state,
)
from hybridengine.engine.response import Response, pack_kept
from hybridengine.kernels import token_log_probs
from hybridengine.kernels.sampling import ragged_likely
from hybridengine.model.attachments import Attachment
from hybridengine.model.rotary import fix_rotary_length
from hybridengine.model.validation import auto_class, config_of, long_rope_limit
from hybridengine.run.config import RLConfig
from hybridengine.sync.checks import config_differences, in_words, plain_values
from hybridengine.sync.layout import CheckpointLayout, LayoutError, identity_layout
from hybridengine.sync.weight_target import WeightTarget


class HfWeights(WeightTarget):
    """The weights of a transformers model on this rank."""

    tp_rank = 0

    def __init__(self, model: torch.nn.Module, config: Any, checkpoint: CheckpointLayout) -> None:
        self._model = model
        tensors = self._tensors()
        self.optional_parameters = checkpoint.buffers
        self.model_config = plain_values(config.to_dict())
        self.config_differences = config_differences(checkpoint.config, self.model_config)
        if extra := sorted(checkpoint.parameters.keys() - tensors.keys()):
            raise LayoutError(
                f"the engine's model has no parameter {extra[0]!r} (and {len(extra) - 1} more of "
                "the trained model). Were both built from the same model?"
                + in_words(self.config_differences)
            )
        self.layout = identity_layout({n: tensors[n] for n in checkpoint.parameters})

    def _tensors(self) -> dict[str, torch.Tensor]:
        named = (*self._model.named_parameters(), *self._model.named_buffers())
        return {name: tensor.detach() for name, tensor in named}

    def weights(self) -> dict[str, torch.Tensor]:
        tensors = self._tensors()
        return {name: tensors[name] for name in self.layout.destinations}

    def load_full(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        own_weights = self.weights()
        for name, tensor in weights:
            own_weights[name].copy_(tensor)

    def finish_update(self) -> None:
        """Do nothing: generation caches nothing between calls."""


class HfEngine(RolloutEngine):
    """Generate left-padded batches with transformers, of up to `rollout.max_num_seqs` sequences."""

    @staticmethod
    def find_faults(config: RLConfig) -> Iterator[str]:
        """Yield what only vLLM can do."""
        rollout, advice = config.rollout, "but the engine is plain generate; set rollout.name=vllm"
        if rollout.tensor_model_parallel_size > 1:
            size = rollout.tensor_model_parallel_size
            yield (
                f"rollout.tensor_model_parallel_size is {size}, {advice} (`make setup` installs "
                "it), or 1"
            )
        if config.reshard.lora == "adapters":
            yield f"reshard.lora is adapters, {advice} (`make setup` installs it), or merged"
        if config.actor.router_replay == "rollout":
            yield (
                f"actor.router_replay is rollout, {advice} (`make setup` installs it), which "
                "records routes, or actor.router_replay to old or off"
            )
        if rollout.engine_kwargs.vllm:
            options = dict(rollout.engine_kwargs.vllm)
            yield f"rollout.engine_kwargs.vllm is {options}, {advice}, or remove it"
        if rollout.quantization:
            yield f"rollout.quantization is {rollout.quantization}, {advice}, or remove it"

    def __init__(self, options: EngineOptions) -> None:
        model, trust = options.model, options.model.trust_remote_code
        config = config_of(model)
        device = torch.device("cuda") if torch.cuda.is_available() else torch.device("cpu")
        self._model = (
            auto_class(config)
            .from_config(config, dtype=options.dtype, trust_remote_code=trust)
            .to(device)
        )
        self._model.eval().requires_grad_(False)
        fix_rotary_length(self._model, options.rollout.max_model_len)
        if long_rope_limit(config) is not None:
            # The models' own drops the cache where transformers would change to the long factors.
            prepare = GenerationMixin.prepare_inputs_for_generation
            self._model.prepare_inputs_for_generation = MethodType(prepare, self._model)
        self.tp_rank, self.tp_size = 0, 1
        self.replica, self.replicas = dist.get_rank(), dist.get_world_size()
        self.dtype, self.takes_images = options.dtype, options.preparer is not None
        self._options = options
        self.target: HfWeights = HfWeights(self._model, config, options.checkpoint)

    def shutdown(self) -> None:
        del self._model

    @torch.no_grad()
    def _generate(
        self, prompts: Sequence[Prompt], spec: SamplingSpec, seed: int
    ) -> list[list[Response]]:
        repeated = [prompt for prompt in prompts for _ in range(spec.n)]
        # Sorted by length, so that little is padded.
        order = sorted(range(len(repeated)), key=lambda i: len(repeated[i].ids))
        done: dict[int, Response] = {}
        max_num_seqs = self._options.rollout.max_num_seqs
        with local_random_state(derive_seed(seed, self.replica)):
            for at in range(0, len(order), max_num_seqs):
                chosen = order[at : at + max_num_seqs]
                batch = self._generate_batch([repeated[i] for i in chosen], spec)
                done |= zip(chosen, batch, strict=True)
        return [[done[i + j] for j in range(spec.n)] for i in range(0, len(done), spec.n)]

    @contextmanager
    def _stream(self, spec: SamplingSpec, seed: int) -> Iterator[_BatchStream]:
        yield _BatchStream(self, spec, seed)

    def _generate_batch(self, prompts: Sequence[Prompt], spec: SamplingSpec) -> list[Response]:
        """Sample one completion for each prompt, all together.

        Those that a weight update interrupts go on with their tokens as part of the prompt.
        """
        completions = [_EMPTY] * len(prompts)
        while running := [i for i, c in enumerate(completions) if c.finish_reason == _INTERRUPTED]:
            num_new = len(completions[running[0]].token_ids)  # of each of them
            rows = [[*prompts[i].ids, *completions[i].token_ids] for i in running]
            images = [prompts[i].images for i in running]
            for i, part in zip(running, self._sample(rows, images, num_new, spec), strict=True):
                completions[i] = completions[i].join(part)
        return completions

    def _sample(
        self,
        prompts: list[list[int]],
        images: Sequence[Sequence[Attachment]],
        num_new: int,
        spec: SamplingSpec,
    ) -> list[Response]:
        """Sample further tokens; the last `num_new` of each prompt belong to the response."""
        rows = [torch.tensor(prompt) for prompt in prompts]
        pad = partial(pad_sequence, batch_first=True, padding_side="left")
        ids = pad(rows).to(self._model.device)
        mask = pad([torch.ones_like(row) for row in rows]).to(ids.device)
        limit = spec.max_tokens - num_new
        sampler = _Sampler(spec)
        stops = _StopTexts(self._options.tokenizer, spec.stop, ids.shape[1] - num_new)
        updates = _UpdatesBetweenSteps(self)
        opened: AbstractContextManager[dict[str, torch.Tensor]] = nullcontext({})
        if (preparer := self._options.preparer) is not None:
            opened = preparer.padded(self._model, ids, mask, images)
        with opened as arguments:
            out = self._model.generate(
                ids,
                attention_mask=mask,
                **arguments,
                logits_processor=LogitsProcessorList([sampler]),
                stopping_criteria=StoppingCriteriaList([updates, *([stops] if spec.stop else [])]),
                max_new_tokens=limit,
                eos_token_id=list(self._options.stop_token_ids),
                pad_token_id=0,
                do_sample=spec.temperature != 0,
                temperature=1.0,  # `sampler` applies these three
                top_k=0,
                top_p=1.0,
            )
        log_probs = sampler.finish(out)
        new = out[:, ids.shape[1] :].tolist()
        completions = []
        for row, token_ids in enumerate(new):
            end = self._end(token_ids, stops.ends.get(row, 0) - num_new)
            reason = "stop" if end else "length" if len(token_ids) == limit else _INTERRUPTED
            size = end or len(token_ids)
            completions.append(
                Response(
                    token_ids[:size],
                    log_probs[row][:size],
                    reason,
                    versions=updates.versions[:size],
                )
            )
        return sampler.with_columns(completions)

    def _end(self, ids: list[int], stopped: int) -> int | None:
        """Return how many tokens there are up to the one that ends the response, None without one.

        stopped: number of tokens that complete a stop text, if any.
        """
        ends = (
            n for n, i in enumerate(ids, 1) if i in self._options.stop_token_ids or n == stopped
        )
        return next(ends, None)


class _BatchStream(RequestStream):
    """Runs all requests of a step to their end, with one generator for all of them."""

    in_batches = True

    def __init__(self, engine: HfEngine, spec: SamplingSpec, seed: int) -> None:
        super().__init__()
        self._engine, self._spec, self._seed = engine, spec, seed
        self._waiting: list[Request] = []
        self._num_steps = 0

    def _add(self, request: Request) -> None:
        self._engine.check_images(request.images)
        self._waiting.append(request)

    def _step(self) -> list[tuple[int, Response]]:
        # In the order of their ids, so that a sample does not depend on which tool was faster.
        requests = sorted(self._waiting, key=lambda request: request.id)
        self._waiting = []
        self._num_steps += 1
        longest = max((request.max_tokens for request in requests), default=0)
        spec = replace(self._spec, n=1, max_tokens=longest)
        completions = self._engine._generate(
            [Prompt(request.prompt_ids, request.images) for request in requests],
            spec,
            derive_seed(self._seed, self._num_steps),
        )
        return [
            (request.id, completion.first(request.max_tokens))
            for request, [completion] in zip(requests, completions, strict=True)
        ]


_INTERRUPTED = "interrupted"  # by a weight update; finish_reason of a response so far
_EMPTY = Response([], [], _INTERRUPTED)


class _Sampler(LogitsProcessor):
    """Applies temperature, min-p, top-k and top-p, and records what each step sampled.

    It keeps the logits [B, V] of one step only. transformers' `output_scores` keeps those of all
    steps: 30 GB for 64 responses of 256 tokens over 152k vocabulary entries.
    """

    def __init__(self, spec: SamplingSpec) -> None:
        self._warpers: Any = LogitsProcessorList()
        if spec.temperature not in (0, 1):
            self._warpers.append(TemperatureLogitsWarper(spec.temperature))
        if spec.temperature and spec.min_p > 0:
            self._warpers.append(MinPLogitsWarper(spec.min_p))
        if spec.temperature and spec.top_k > 0:
            self._warpers.append(TopKLogitsWarper(spec.top_k))
        if spec.temperature and spec.top_p < 1:
            self._warpers.append(TopPLogitsWarper(spec.top_p))
        self._records_kept, self._num_likely = spec.records, spec.record_likely
        self._scores: torch.Tensor | None = None  # of the step whose tokens are not known yet
        self._log_probs: list[torch.Tensor] = []  # of each step, [B]
        self._kept: list[tuple[torch.Tensor, ...]] = []  # of each step, the ids of each row
        self._likely: list[tuple[torch.Tensor, torch.Tensor]] = []  # of each step, ids, log-probs
        self._vocab_size = 0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if self._scores is not None:
            self._record(input_ids[:, -1])
        self._scores = self._warpers(input_ids, scores)
        self._vocab_size = scores.shape[1]
        return self._scores

    def finish(self, sequences: torch.Tensor) -> list[list[float]]:
        """Return the log-prob of every new token of each row. sequences: what was generated."""
        self._record(sequences[:, -1])
        self._scores = None
        return torch.stack(self._log_probs, 1).tolist()

    def _record(self, token_ids: torch.Tensor) -> None:
        assert self._scores is not None
        self._log_probs.append(token_log_probs(self._scores, token_ids)[0])
        if self._records_kept:
            is_kept = self._scores > -torch.inf
            counts = is_kept.sum(1).tolist()
            self._kept.append(is_kept.nonzero()[:, 1].cpu().split(counts))
        if self._num_likely:
            log_probs = self._scores.float().log_softmax(1)
            own, count = token_ids.unsqueeze(1), min(self._num_likely, log_probs.shape[1])
            values, ids = log_probs.topk(count)
            first = log_probs.gather(1, own)
            self._likely.append((torch.cat([own, ids], 1), torch.cat([first, values], 1)))

    def with_columns(self, completions: list[Response]) -> list[Response]:
        """Add the entries that each token was sampled from, and the most likely ones, if recorded.

        Call `finish` first.
        """
        result = []
        for row, c in enumerate(completions):
            size, columns = len(c.token_ids), dict[str, Any]()
            if self._records_kept:
                kept = [step[row].tolist() for step in self._kept[:size]]
                columns |= pack_kept(c.token_ids, kept, self._vocab_size)
            if self._num_likely and size:
                steps = [(ids[row], values[row]) for ids, values in self._likely[:size]]
                ids, values = (torch.cat(part).tolist() for part in zip(*steps, strict=True))
                columns |= ragged_likely(ids, values, size)
            result.append(replace(c, columns=columns))
        return result


class _UpdatesBetweenSteps(StoppingCriteria):
    """Takes weights that are due; stops all rows where their KV caches are to be recomputed.

    versions: of the weights that sampled each token so far, as runs of one token.
    """

    def __init__(self, engine: HfEngine) -> None:
        self._engine = engine
        self.versions: list[tuple[int, int]] = []

    def __call__(
        self, input_ids: torch.Tensor, scores: torch.Tensor, **kwargs: Any
    ) -> torch.Tensor:
        in_flight, is_interrupted = self._engine.in_flight, False
        self.versions.append((self._engine.weight_version or 0, 1))
        if in_flight is not None and in_flight.is_due():
            in_flight.update()
            is_interrupted = not in_flight.keep_kv
        return torch.full((len(input_ids),), is_interrupted, device=input_ids.device)


class _StopTexts(StoppingCriteria):
    """Stop each row at the token that completes one of `texts`.

    ends: row → number of its new tokens up to there.
    """

    def __init__(self, tokenizer: Any, texts: Sequence[str], prompt_length: int) -> None:
        if texts and tokenizer is None:
            raise ValueError("SamplingSpec.stop needs decoded text: give EngineOptions a tokenizer")
        self._tokenizer, self._texts, self._prompt_length = tokenizer, texts, prompt_length
        # A token is at least one byte, a character at most four; the margin is for special tokens.
        self._tail = 4 * max(map(len, texts), default=0) + 16
        self.ends: dict[int, int] = {}

    def __call__(
        self, input_ids: torch.Tensor, scores: torch.Tensor, **kwargs: Any
    ) -> torch.Tensor:
        new = input_ids[:, self._prompt_length :]
        tails = self._tokenizer.batch_decode(new[:, -self._tail :], skip_special_tokens=True)
        for row, tail in enumerate(tails):
            if row not in self.ends and any(text in tail for text in self._texts):
                self.ends[row] = new.shape[1]
        done = [row in self.ends for row in range(len(tails))]
        return torch.tensor(done, device=input_ids.device)
