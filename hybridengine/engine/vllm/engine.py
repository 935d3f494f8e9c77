"""vLLM as an in-process engine on the ranks that train (`external_launcher`, tensor parallel).

Every rank builds one `LLM`; the ranks of a tensor-parallel group run in lockstep on the same
prompts. The weights start uninitialised (`load_format="dummy"`); only the reshard writes them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from hybridengine.engine.exact.operators import exact_engine, use_exact_operators, use_plain_head
from hybridengine.engine.interface import (
    CacheSize,
    ColumnRecorder,
    EngineOptions,
    Prompt,
    Request,
    RequestStream,
    RolloutEngine,
    SamplingSpec,
    check_prompt,
    derive_seed,
    local_random_state,
)
from hybridengine.engine.response import Response, pack_kept
from hybridengine.engine.vllm.environment import (
    models_inspected_here,
    own_model_classes,
    prepare_environment,
    strided_groups,
    unbound_memory,
    unchanged_local_world_size,
    unique_shared_memory,
)
from hybridengine.engine.vllm.options import check_plugins, find_faults, llm_options
from hybridengine.engine.vllm.post_load import writable_weights
from hybridengine.engine.vllm.sampling import (
    fuse_sampler,
    record_kept_ids,
    request_generators,
    seeded,
)
from hybridengine.engine.vllm.sleep import Level2Sleep
from hybridengine.engine.vllm.weights import (
    LoraSlot,
    VllmWeights,
    refresh_caches,
    slot_options,
    updates_between_steps,
)
from hybridengine.kernels.pages import DONTNEED, HUGEPAGE, advise_pages
from hybridengine.kernels.sampling import ragged_likely
from hybridengine.model.attachments import Attachment, VllmPrompt, plain_prompt
from hybridengine.model.shared_weights import Part, SlicedWeights, engine_parts, parameter_views
from hybridengine.run import load_plugin
from hybridengine.run.messages import all_gather_values, broadcast_value, group_timeout
from hybridengine.sync.layout import LayoutError
from hybridengine.sync.senders import ranks_per_node
from hybridengine.sync.shards import tp_groups
from hybridengine.sync.weight_target import write_constants


class VllmEngine(RolloutEngine):
    """A vLLM engine whose weights are written in place by the reshard.

    Its tensor-parallel size is a divisor of the world size and of the attention heads. `sleep()`
    frees weights and cache on a GPU, the cache alone on a CPU.
    """

    find_faults = staticmethod(find_faults)

    def __init__(self, options: EngineOptions) -> None:
        prepare_environment()
        check_plugins()
        from vllm import LLM

        rollout, checkpoint, on_gpu = options.rollout, options.checkpoint, torch.cuda.is_available()
        world_size, self.tp_size = dist.get_world_size(), rollout.tensor_model_parallel_size
        groups = self._groups = tp_groups(world_size, self.tp_size, ranks_per_node(world_size))
        self.replicas, self.checkpoint = len(groups), checkpoint
        self.replica = next(j for j, group in enumerate(groups) if dist.get_rank() in group)
        self.stop_token_ids, self.free_cache = options.stop_token_ids, rollout.free_cache_engine
        arguments = llm_options(options) | slot_options(options.adapter_rank, checkpoint.parameters)
        self.takes_images = options.preparer is not None
        if options.preparer is not None:
            architectures = checkpoint.config.get("architectures") or ()
            arguments |= options.preparer.vllm_arguments(architectures, rollout.limit_images)
        self._recorder: ColumnRecorder | None = None
        if options.record_routes:
            self._recorder = load_plugin("recorders", "routes", "actor.router_replay")()
            arguments |= self._recorder.arguments()
        drafts: Any = None
        if drafting := arguments.get("speculative_config"):
            key = "rollout.engine_kwargs.vllm.speculative_config.method"
            drafts = load_plugin("drafts", drafting["method"], key)
            arguments |= drafts.arguments(options)
        way: AbstractContextManager[dict[str, Any]] = nullcontext({})
        if options.exact:
            way = exact_engine()
        with (
            unchanged_local_world_size(),
            models_inspected_here(),
            unbound_memory(),
            own_model_classes(),
            strided_groups(groups),
            writable_weights() as post_load,
            unique_shared_memory(),
            way as required,
        ):
            self._llm = LLM(**arguments | required)
        self.target: EngineWeights = EngineWeights(self, self._llm, checkpoint, post_load)
        self.tp_rank, self.dtype = self.target.tp_rank, self.target.dtype
        self.model_runner = self._llm.llm_engine.model_executor.driver_worker.worker.model_runner
        self._prompt: VllmPrompt = plain_prompt
        if options.preparer is not None:
            self._prompt = options.preparer.vllm_prompt(self._llm.llm_engine.renderer)
        if self._recorder is not None:
            self._recorder.attach(self._llm, self.model_runner)
        self._slot = LoraSlot(self.model_runner) if options.adapter_rank else None
        self.target.slot = self._slot
        sleeps = self.free_cache and on_gpu
        self._level2_sleep = Level2Sleep.of(self._llm) if sleeps else None
        self._keeps_weights = False
        self.target.discards_weights = self._level2_sleep is not None
        if not on_gpu:
            for cache in self.model_runner.kv_caches:
                # The pages that it has are small: they are given back.
                advise_pages(cache.untyped_storage(), HUGEPAGE, DONTNEED)
        if options.exact:
            max_model_len = self._llm.model_config.max_model_len
            use_exact_operators(self.model_runner.get_model(), max_model_len, self._slot)
        elif not on_gpu:
            use_plain_head(self.model_runner.get_model())
        fuse_sampler(self.model_runner, options.exact)
        self.drafts = drafts and drafts(self._llm)

    @property
    def llm(self) -> Any:
        """The `vllm.LLM` of this rank."""
        return self._llm

    def share_weights(self, dtype: torch.dtype, frozen: bool = True) -> Mapping[str, torch.Tensor]:
        """Return the trained parameters as views of the engine's tensors. Collective.

        Where the engine divides them over ranks, they are `SlicedWeights`, and where it quantizes
        them those of its `Quantization`, if `frozen`.

        From then on `sleep` frees the key-value cache alone. dtype: of the trainer's computation.
        frozen: the caller fills them, and a sync writes the other parameters only (buffers,
        adapters); else a sync writes all parameters.

        Raises LayoutError where the engine holds a parameter in another form.
        """
        target, checkpoint = self.target, self.checkpoint
        if self._level2_sleep is None and self.free_cache and torch.cuda.is_available():
            raise LayoutError("the engine's sleep_mode_backend is not vLLM's own")
        if target.layout.quantized and (self.tp_size > 1 or not frozen):
            raise LayoutError(f"the engine of {self.tp_size} ranks quantizes its weights")
        shapes = {n: s for n, s in checkpoint.parameters.items() if n not in checkpoint.buffers}
        weights = target.weights()
        views: Mapping[str, torch.Tensor]
        if target.layout.quantized:
            scheme = load_plugin("quantizations", "fp8", "rollout.quantization")
            views = scheme.parameters(target.layout, weights, shapes, dtype)
        elif self.tp_size == 1:
            views = parameter_views(target.layout, weights, shapes, dtype)
        else:
            held = engine_parts(target.layout, weights, shapes, dtype)
            # The trainer's timeout, which vLLM's own group does not have.
            group, _ = dist.new_subgroups_by_enumeration(self._groups, group_timeout())
            parts = all_gather_values(held, list[Part], group)
            views = SlicedWeights(target.layout, weights, parts, shapes, dtype, group)
        if frozen:
            write_constants(target.layout, weights)
            target.layout = target.layout.without(views)
        self._level2_sleep, self._keeps_weights = None, True
        target.discards_weights = False
        return views

    def _generate(
        self, prompts: Sequence[Prompt], spec: SamplingSpec, seed: int
    ) -> list[list[Response]]:
        requests = [self._prompt(*prompt) for prompt in prompts]
        seeds = [derive_seed(seed, i * self.replicas + self.replica) for i in range(len(prompts))]
        lora = self._slot.request if self._slot else None
        with self._sampling(spec, seeds[0]) as (sampling, convert):
            outputs = self._llm.generate(
                requests, seeded(sampling, seeds), use_tqdm=False, lora_request=lora
            )
        for output, prompt in zip(outputs, prompts, strict=True):
            check_prompt("vLLM", output.prompt_token_ids or (), prompt.ids)
        return [convert(output) for output in outputs]

    @contextmanager
    def _sampling(
        self, spec: SamplingSpec, seed: int
    ) -> Iterator[tuple[Any, Callable[[Any], list[Response]]]]:
        """Sample by `spec` while open.

        Yields (`SamplingParams`, what makes completions of a `RequestOutput`).
        """
        from vllm import SamplingParams

        sampling = SamplingParams(
            n=spec.n,
            temperature=spec.temperature,
            top_p=spec.top_p,
            top_k=spec.top_k,
            min_p=spec.min_p,
            max_tokens=spec.max_tokens,
            logprobs=spec.record_likely if self.tp_rank == 0 else 0,
            flat_logprobs=True,
            stop_token_ids=list(self.stop_token_ids),
            stop=list(spec.stop),
            include_stop_str_in_output=True,
            detokenize=bool(spec.stop),
        )
        # The other ranks of a replica keep the same entries.
        record = spec.records and self.tp_rank == 0
        recording = record_kept_ids(self._llm, self.model_runner) if record else nullcontext()
        engine, in_flight = self._llm.llm_engine, self.in_flight
        updating = updates_between_steps(engine, in_flight) if in_flight else nullcontext()
        # vLLM draws from torch's state as well, though it uses the numbers of no seeded request.
        with local_random_state(seed), request_generators(), recording, updating:
            vocab_size = self._llm.model_config.get_vocab_size() if record else None
            recorder = self._recorder if spec.record_routes and self.tp_rank == 0 else None
            yield sampling, partial(_completions, vocab_size=vocab_size, recorder=recorder)

    @contextmanager
    def _stream(self, spec: SamplingSpec, seed: int) -> Iterator[VllmStream]:
        with self._sampling(replace(spec, n=1), seed) as (sampling, convert):
            lora_request = self._slot and self._slot.request
            engine, prompt = self._llm.llm_engine, self._prompt
            stream = VllmStream(engine, sampling, lora_request, prompt, convert)
            try:
                yield stream
            finally:
                stream.abort()

    def broadcast(self, value: Any, expected: Any) -> Any:
        if self.tp_size == 1:
            return value
        from vllm.distributed.parallel_state import get_tp_group

        return broadcast_value(value, expected, 0, get_tp_group().cpu_group)

    def cache_size(self) -> CacheSize:
        cache = self._llm.llm_engine.vllm_config.cache_config
        num_bytes = sum(x.numel() * x.element_size() for x in self.model_runner.kv_caches)
        assert cache.num_gpu_blocks is not None  # known once the engine is built
        return CacheSize(cache.num_gpu_blocks * cache.block_size, cache.block_size, num_bytes)

    def _suspend(self) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
            if self._keeps_weights:
                self.target.reset_caches()
                self._llm.llm_engine.model_executor.discard(("kv_cache",))
            elif self._level2_sleep is None:
                self._llm.sleep(level=1)
            else:
                self._level2_sleep.sleep(self.written_in_full())
                self.target.discarded = True
            return
        self.target.reset_caches()
        for cache in self.model_runner.kv_caches:
            advise_pages(cache.untyped_storage(), DONTNEED)

    def _resume(self, part: str) -> None:
        if not torch.cuda.is_available() or (part == "weights" and self._keeps_weights):
            return
        if part == "weights" and self._level2_sleep is not None:
            self._level2_sleep.wake_weights()
        else:
            self._llm.wake_up(tags=[part])

    def written_in_full(self) -> list[torch.Tensor]:
        """Return the tensors of which a sync writes every element."""
        by_loader, weights = self.target.layout.by_loader, self.target.weights()
        return [tensor for name, tensor in weights.items() if name not in by_loader]

    def shutdown(self) -> None:
        self._llm.llm_engine.engine_core.shutdown()


class EngineWeights(VllmWeights):
    """The weights of a `VllmEngine`, which is awake during an update, and may have requests."""

    def __init__(self, engine: VllmEngine, *args: Any) -> None:
        super().__init__(*args)
        self._engine = engine

    def check_ready(self) -> None:
        if self._engine.in_flight is None:
            super().check_ready()
        else:  # with running requests, too
            self._check_config()

    def _prepare_update(self) -> None:
        self._engine.wake_weights()

    def finish_update(self) -> None:
        super().finish_update()
        version = str(self.state.updating_to)
        self._llm.llm_engine.set_weight_version(version)  # vLLM notes it with each token

    def reset_caches(self) -> None:
        if self._engine.in_flight is None:
            super().reset_caches()
        else:
            refresh_caches(self._llm, self._engine.in_flight.keep_kv)


def _completions(
    output: Any, vocab_size: int | None, recorder: ColumnRecorder | None
) -> list[Response]:
    """Convert the outputs of a `RequestOutput`.

    vocab_size: given where they have sampling masks.
    recorder: of further columns.
    """
    completions = []
    for sample in output.outputs:
        flat, ids = sample.logprobs, list(sample.token_ids)
        log_probs = [flat.logprobs[i] for i in flat.start_indices]
        if [flat.token_ids[i] for i in flat.start_indices] != ids:
            raise RuntimeError(
                f"vLLM returned {len(log_probs)} log-probs for a completion of {len(ids)} tokens, "
                "expected one for each token"
            )
        versions = [(int(run.version), run.end - run.start) for run in sample.weight_versions]
        columns = dict[str, Any]()
        if vocab_size is not None:
            mask = sample.sampling_mask.token_ids if sample.sampling_mask else []
            columns |= pack_kept(ids, mask, vocab_size)
        if len(flat.token_ids) > len(ids):
            columns |= ragged_likely(flat.token_ids, flat.logprobs, len(ids))
        if recorder is not None:
            columns |= recorder.columns(sample, len(output.prompt_token_ids))
        completions.append(Response(ids, log_probs, sample.finish_reason, versions, columns))
    return completions


class VllmStream(RequestStream):
    """Adds requests to `engine`, vLLM's `LLMEngine`, between its steps.

    sampling: `SamplingParams` of all requests but for seed and length.
    prompt: makes a prompt of token ids and images.
    convert: makes the completions of a `RequestOutput`.
    """

    def __init__(
        self,
        engine: Any,
        sampling: Any,
        lora_request: Any,
        prompt: Callable[[Sequence[int], Sequence[Attachment]], Any],
        convert: Callable[[Any], list[Response]],
    ) -> None:
        from vllm.sampling_params import RequestOutputKind

        super().__init__()
        self._engine, self._sampling, self._convert = engine, sampling, convert
        self._lora_request, self._prompt = lora_request, prompt
        self._sampling.output_kind = RequestOutputKind.FINAL_ONLY
        self._internal: dict[str, str] = {}  # our id → vLLM's, of the requests that run

    def _add(self, request: Request) -> None:
        [sampling] = seeded(self._sampling, [request.seed])
        sampling.max_tokens = request.max_tokens
        name, prompt = str(request.id), self._prompt(request.prompt_ids, request.images)
        self._internal[name] = self._engine.add_request(
            name, prompt, sampling, lora_request=self._lora_request
        )

    def _step(self) -> list[tuple[int, Response]]:
        if not self.num_running:
            return []
        finished = [output for output in self._engine.step() if output.finished]
        for output in finished:
            del self._internal[output.request_id]
        return [(int(output.request_id), self._convert(output)[0]) for output in finished]

    def abort(self) -> None:
        """Remove requests that have not finished, so that they are not part of later batches."""
        if self._internal:
            self._engine.abort_request(list(self._internal.values()), internal=True)
            self._internal.clear()
