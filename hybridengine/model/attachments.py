"""Bytes that a prompt has beside its text, such as images: the core carries them unopened.

A plug opens them: an `AttachmentPreparer`, which a model extension loads for the models that take
attachments (`hybridengine.model.extensions`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from torch import Tensor, nn

from hybridengine.model.packed import PartSource


@dataclass(frozen=True)
class Attachment:
    """An image as it is stored, in a file or in memory.

    where: row of a data file, or tool, that it is from; for messages.
    sha256: of the encoded bytes.
    path: of its file; empty where `data` has the bytes.
    """

    where: str
    sha256: str
    path: str = ""
    data: bytes = b""

    @property
    def name(self) -> str:
        """Its file, or the hash of an image in memory: its name in rollout files."""
        return self.path or f"sha256:{self.sha256}"


@dataclass(frozen=True)
class Replacement:
    """What the placeholder of an attachment in a text was replaced by.

    start, end: characters of the placeholder before.
    length: of the text after.
    """

    start: int
    end: int
    length: int


AttachmentRows = Sequence[Sequence[Attachment]]  # of each sequence of a batch


class AttachmentPreparer(ABC):
    """Opens attachments for one model.

    settings: hash of all that the preparation depends on, besides the attachment.
    chat_template: the processor's own; None: that of the tokenizer.
    """

    @property
    @abstractmethod
    def settings(self) -> str: ...

    @property
    @abstractmethod
    def chat_template(self) -> str | None: ...

    @abstractmethod
    def expand(
        self, where: str, text: str, attachments: Sequence[Attachment]
    ) -> tuple[str, list[Replacement]]:
        """Expand the placeholder of each attachment in a rendered text to its tokens.

        Raises DataError where there are more or fewer placeholders than attachments.
        """

    @abstractmethod
    def parts(self, attachments: AttachmentRows) -> Mapping[str, PartSource]:
        """Return the `parts` of `pack_rollouts` for sequences with these attachments."""

    @abstractmethod
    def padded(
        self, model: nn.Module, ids: Tensor, mask: Tensor, attachments: AttachmentRows
    ) -> AbstractContextManager[dict[str, Tensor]]:
        """Open what the model reads of the attachments of a left-padded batch [B, L].

        While open, placeholders that are not of these attachments, but sampled, are text.
        """

    @abstractmethod
    def vllm_arguments(self, architectures: Sequence[str], limit: int | None) -> dict[str, Any]:
        """Prepare vLLM for these models, and return arguments of `vllm.LLM`.

        limit: attachments of a prompt; None: vLLM's own.
        """

    @abstractmethod
    def vllm_prompt(self, renderer: Any) -> VllmPrompt:
        """Return what makes vLLM's form of a prompt; renderer: of vLLM's `LLMEngine`."""


class Conflict(NamedTuple):
    """A setting of a job that attachments are not supported with, and what to do."""

    setting: str
    remedy: str = "leave it out, or the images"


class VllmPrompt(Protocol):
    """Makes vLLM's form of a prompt of token ids and attachments."""

    def __call__(self, ids: Sequence[int], attachments: Sequence[Attachment], /) -> Any: ...


def plain_prompt(ids: Sequence[int], attachments: Sequence[Attachment]) -> Any:
    """Return vLLM's form of a prompt without attachments, for models that take none."""
    assert not attachments, "RolloutEngine.takes_images"
    return {"prompt_token_ids": list(ids)}
