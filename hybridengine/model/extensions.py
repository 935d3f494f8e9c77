"""What optional packages add to models: a mixture's experts and routers, a vision tower.

The core names none of them. A package registers a `ModelExtension` in the entry-point group
`hybridengine.models`; what stays with a loaded model is a `ModelHook`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from torch import Tensor, nn

from hybridengine.run import load_plugin, plugins

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from transformers import PretrainedConfig

    from hybridengine.model.attachments import Attachment, AttachmentPreparer, Conflict
    from hybridengine.model.packed import PackedBatch, Part, PartSource
    from hybridengine.run.config import JobConfig
    from hybridengine.sync.adapter import Adapter

SharedFactors = Literal["none", "outer", "all"]  # of adapters of experts, see `apply_lora`
PartReader = Callable[..., "PartSource | None"]


class ModelHook:
    """Something that takes part in the passes of one model, see `add_hook`.

    name: of the part of a batch that it records, where it records one.
    divisible: whether tokens that the loss gives no gradient may have passes of their own without.
    """

    name, divisible = "", True

    def forward(self, batch: PackedBatch) -> AbstractContextManager[object]:
        """Return what is open while the model computes `batch`."""
        return nullcontext()

    def begin_step(self, batches: Sequence[PackedBatch], grad_scale: float = 1.0) -> None:
        """Begin an optimizer step over the micro-batches of this rank. Collective.

        grad_scale: factor of the gradients of any loss.
        """

    def end_step(self, *, updated: bool = True) -> dict[str, Tensor]:
        """End the step; return metrics. updated: the update was not skipped. Collective."""
        return {}

    def recording(self) -> AbstractContextManager[list[Part]] | None:
        """Return a context that collects a part per forward, for later ones; None: it has none."""
        return None

    def restore(self) -> None:
        """Give the modules their parameters, also after a forward without a backward."""

    def pop_metrics(self) -> dict[str, float]:
        """Return metrics of the forward passes since the last call. Collective."""
        return {}


def add_hook(model: nn.Module, hook: ModelHook) -> None:
    """Let `hook` take part in the passes of `model`."""
    model._hybridengine_hooks = (*hooks_of(model), hook)  # type: ignore[assignment]


def hooks_of(model: nn.Module) -> tuple[ModelHook, ...]:
    """Return the hooks of `model` in the order in which they were added."""
    return getattr(model, "_hybridengine_hooks", ())


@contextmanager
def recorded_parts(model: nn.Module) -> Iterator[dict[str, list[Part]]]:
    """While open, hooks of `model` record parts of batches: by name, one for each forward pass."""
    with ExitStack() as stack:
        contexts = {hook.name: hook.recording() for hook in hooks_of(model)}
        yield {n: stack.enter_context(x) for n, x in contexts.items() if x is not None}


def pop_metrics(model: nn.Module) -> dict[str, float]:
    """Return what the hooks of `model` measured since the last call. Collective."""
    return {name: x for hook in hooks_of(model) for name, x in hook.pop_metrics().items()}


class ModelExtension:
    """What a package adds to the models of a job; by default nothing.

    image_model_types: transformers' types of the models with a vision tower that can run packed.
    stateful_model_types: those with a state along the sequence that can, after `prepare`.
    exact_model_types: those whose exact forwards were compared with vLLM's models, bit for bit.
    """

    image_model_types: tuple[str, ...] = ()
    stateful_model_types: tuple[str, ...] = ()
    exact_model_types: tuple[str, ...] = ()

    def check(self, config: JobConfig, model: PretrainedConfig, engine: str, exact: bool) -> None:
        """Raise an error of the user for settings that the trained model does not support.

        config: with data types in place of `auto`.
        engine: the one that generates; "" for none. exact: it has the trainer's operators.
        """

    def prepare(self, model: Any) -> None:
        """Change what `model`, which has just been built, needs to run packed; on every rank."""

    def exact_forwards(self, model: nn.Module, splits: Mapping[str, int]) -> Mapping[Any, Any]:
        """Return forwards of `rollout.exact` of modules of `model`, a trained one or an engine's.

        They take the module first, and call those in it. Raises ModelError if there are none.
        splits: weights of a trained one that an engine slices → into how many slices.
        """
        return {}

    def exactness_obstacle(self, config: JobConfig, model: PretrainedConfig) -> str | None:
        """Return why a job cannot have `rollout.exact` with the model, None if it can."""
        return None

    def changes(self, config: JobConfig) -> Iterable[Callable[[Any], object]]:
        """Return changes of the trained model before it is sharded, the same on every rank."""
        return ()

    def attach(self, model: Any, config: JobConfig, *, is_trained: bool) -> None:
        """Add hooks to the policy that is loaded and sharded, or to its frozen reference."""

    def load_preparer(
        self,
        model: PretrainedConfig,
        path: str,
        options: Mapping[str, Any],
        trust_remote_code: bool,
    ) -> AttachmentPreparer | None:
        """Load what opens attachments for the model in the folder `path`; None: not this one.

        options: `data.mm_processor_kwargs`.
        """
        return None

    def place_attachments(
        self,
        where: str,
        folder: Path,
        chat: Sequence[Mapping[str, Any]],
        row: Mapping[str, Any],
        columns: Sequence[str],
    ) -> tuple[list[dict[str, Any]], list[Attachment]]:
        """Return the chat of a row, and its attachments in the order of their parts in it.

        Their parts are left without content. A message without attachments has text as content.

        where: the row, for errors.
        folder: that paths are relative to.
        columns: names of the columns that may have the attachments.
        Raises DataError for attachments that cannot be read, or that have no place.
        """
        raise NotImplementedError

    def conflicts(self, config: JobConfig) -> Sequence[Conflict]:
        """Return the settings of a job that attachments are not supported with."""
        return ()

    def part_readers(self, config: JobConfig) -> Mapping[str, PartReader]:
        """Return what makes parts of batches of the job, by the name of the part.

        A reader takes the columns of responses end to end and their lengths, and returns None
        where they have no such part.
        """
        return {}


class MixtureExtension(ModelExtension):
    """The experts of mixtures, registered as `experts`.

    implementation: their name in transformers' experts interface. A token's result does not depend
      on the other tokens.
    mesh_dims: names of the dimensions of the mesh over which experts are divided: the ranks that
      hold the same experts, and those that hold different ones.
    distribute: divides the experts of a model on the meta device over that mesh; returns them.
    check_targets: raises ModelError for target_parameters that are no weights of experts.
    use_grouped_adapters: makes PEFT's adapters of experts grouped products, in place.
    adapter_of: returns the adapter of one of PEFT's layers of experts, as a sync merges it.
    """

    implementation: str
    mesh_dims: tuple[str, str]
    distribute: Callable[[nn.Module, DeviceMesh], list[nn.Module]]
    check_targets: Callable[[nn.Module, Sequence[str]], None]
    use_grouped_adapters: Callable[[Any, SharedFactors], None]
    adapter_of: Callable[[Any], Adapter]


@cache
def model_extensions() -> tuple[ModelExtension, ...]:
    """Return the registered extensions."""
    return tuple(entry.load() for entry in plugins("models").values())


def image_model_types() -> tuple[str, ...]:
    """Return the types of all models with a vision tower that can run packed."""
    return tuple(kind for x in model_extensions() for kind in x.image_model_types)


def stateful_model_types() -> tuple[str, ...]:
    """Return the types of all models with a state along the sequence that can run packed."""
    return tuple(kind for x in model_extensions() for kind in x.stateful_model_types)


def exact_model_types() -> tuple[str, ...]:
    """Return the types of all models whose parts of extensions may be exact."""
    return tuple(kind for x in model_extensions() for kind in x.exact_model_types)


def prepare_model(model: Any) -> None:
    """Let each registered extension change a model that has just been built, so it runs packed."""
    for extension in model_extensions():
        extension.prepare(model)


def exact_forwards(model: nn.Module, splits: Mapping[str, int]) -> dict[Any, Callable[..., Any]]:
    """Return what the registered extensions have as `ModelExtension.exact_forwards`."""
    return {m: f for x in model_extensions() for m, f in x.exact_forwards(model, splits).items()}


def mixture_extension(key: str) -> MixtureExtension:
    """Return the extension `experts`; key: the configuration key that needs it, for the error."""
    extension: MixtureExtension = load_plugin("models", "experts", key)
    return extension


def experts_implementation() -> str | None:
    """Return transformers' name of the registered experts; None where there are none."""
    found = [x for x in model_extensions() if isinstance(x, MixtureExtension)]
    return found[0].implementation if found else None
