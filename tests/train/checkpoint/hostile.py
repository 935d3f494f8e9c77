"""Metadata of checkpoints that would run code where `pickle.load` reads it."""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hybridengine.run.storage import write_manifest
from hybridengine.train.checkpoint.folders import open_checkpoint


class Call:
    """Pickled as a call."""

    def __init__(self, function: Any, *args: Any) -> None:
        self._call = (function, args)

    def __reduce__(self) -> Any:
        return self._call


def _named(module: str, name: str, argument: str) -> bytes:
    """Pickle `module.name(argument)` by opcodes: the name may have dots, and is not imported."""
    text = [b"\x8c" + bytes([len(t)]) + t.encode() for t in (module, name, argument)]
    return b"\x80\x04" + text[0] + text[1] + b"\x93" + text[2] + b"\x85R."


def hostile_metadata(ran: Path) -> Iterator[tuple[str, bytes]]:
    """Yield (what, pickle); each creates the file `ran` where it is run."""
    touch = f"import pathlib; pathlib.Path({str(ran)!r}).touch()"
    yield "os.system", pickle.dumps(Call(os.system, f"touch {ran}"))
    yield "exec", pickle.dumps({"state_dict_metadata": [Call(exec, touch)]})
    get = Call(getattr, Call(__import__, "os"), "system")
    yield "getattr", pickle.dumps(Call(Call, get, f"touch {ran}"))
    filesystem = "torch.distributed.checkpoint.filesystem"
    yield "a module's import", _named(filesystem, "os.system", f"touch {ran}")
    metadata = "torch.distributed.checkpoint.metadata"
    yield "a class's globals", _named(metadata, "os.system", f"touch {ran}")
    size = "__class__.__init__.__globals__"
    yield "an attribute of an admitted class", _named("torch", f"Size.{size}", str(ran))
    yield "persistent id", b"\x80\x04Pos.system\n."
    yield "extension registry", b"\x80\x04\x82\x01."


def replace_metadata(checkpoint: Path, content: bytes, folder: str = "tensors") -> None:
    """Replace DCP's metadata in a checkpoint as its author could: all checksums are right."""
    step = open_checkpoint(checkpoint).step
    (checkpoint / folder / ".metadata").write_bytes(content)
    (checkpoint / "complete.json").unlink()
    write_manifest(checkpoint, step=step, score=None)
