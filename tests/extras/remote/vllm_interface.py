"""What both halves of our backend use of vLLM 0.32 and 0.33: names and parameters, recorded.

    python -m tests.extras.remote.vllm_interface vllm-0.33.0-….whl # or a folder with vllm/

compares the recorded signatures with those of a wheel, which need not be installable here, then
imports our halves beside its Python files.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

__all__ = ["INTERFACE", "VERSIONS", "differences", "import_beside", "recorded", "version_of"]

VERSIONS = ("0.32", "0.33")
# Module → name → signature; a pair where the two versions differ, None where there is none. "x=" is
# a parameter or field with a default. "property", "attribute" (of self), "value" (of the module).
INTERFACE: dict[str, dict[str, str | tuple[str | None, str | None]]] = {
    "vllm.distributed.weight_transfer.base": {
        "TrainerInitInfo": "rank",
        "TrainerInitInfo.is_sender": "property",
        "TrainerWeightTransferEngine.__init__": (
            "self, *, client, source=, is_sender=",
            "self, *, client, source=, is_sender=, rank=",
        ),
        "TrainerWeightTransferEngine.send_weights": "self",
        "TrainerWeightTransferEngine.shutdown": "self",
        "TrainerWeightTransferEngine.trainer_init": "cls, init_info, *, client, source=",
        "VLLMWeightSyncClient.finish_weight_update": "self, weight_version=",
        "VLLMWeightSyncClient.init_weight_transfer_engine": "self, init_info",
        "VLLMWeightSyncClient.start_weight_update": "self",
        "VLLMWeightSyncClient.update_weights": "self, update_info",
        "ModuleSource.__init__": "self, module",
        "ModuleSource._module": "attribute",
        "ParamMeta": (
            "name, dtype, shape",
            "name, dtype, shape, owners=, mesh_shape=, placements=",
        ),
        "Replicate": (None, ""),
        "Shard": (None, "dim"),
        "WeightSource.__iter__": ("self", None),
        "WeightSource.groups": ("self", None),
        "WeightSource.held_names": ("self", None),
        "WeightSource.implements_iter_full": (None, "self"),
        "WeightSource.implements_iter_local": (None, "self"),
        "WeightSource.iter_full": (None, "self"),
        "WeightSource.iter_groups": ("self", None),
        "WeightSource.iter_local": (None, "self"),
        "WeightSource.metadata": ("self", "property"),
        "WeightSource.owned_names": (None, "self, rank"),
        "WeightTransferEngine.__init__": "self, config, vllm_config, device, model",
        "WeightTransferEngine.finish_weight_update": "self",
        "WeightTransferEngine.init_transfer_engine": "self, init_info",
        "WeightTransferEngine.parse_init_info": "self, init_dict",
        "WeightTransferEngine.parse_update_info": "self, update_dict",
        "WeightTransferEngine.receive_weights": "self, update_info",
        "WeightTransferEngine.shutdown": "self",
        "WeightTransferEngine.start_weight_update": "self",
        "WeightTransferEngine.supports_draft_weight_update": "value",
        "WeightTransferEngine.update_weights": "self, update_info",
        "WeightTransferInitInfo": "",
        "WeightTransferUpdateInfo": "",
    },
    "vllm.distributed.weight_transfer.clients": {
        "HTTPVLLMWeightSyncClient.__init__": "self, base_url, timeout=",
        "RayVLLMWeightSyncClient.__init__": "self, handle",
        "RayVLLMWeightSyncClient.handles": "attribute",
    },
    "vllm.distributed.weight_transfer.factory": {
        "WeightTransferEngineFactory._registry": "value",
        "WeightTransferEngineFactory.create_engine": "cls, config, vllm_config, device, model",
        "WeightTransferEngineFactory.register_engine": "cls, name, module_path_or_cls, class_name=",
        "WeightTransferTrainerFactory._registry": "value",
        "WeightTransferTrainerFactory.register_engine": (
            "cls, name, module_path_or_cls, class_name="
        ),
        "WeightTransferTrainerFactory.trainer_init": "cls, init_info, *, client, source=",
    },
    "vllm.distributed.weight_transfer.m2n_source": {
        "DTensorModuleSource.__init__": ("self, module, num_trainer_ranks", None),
        "DTensorModuleSource._module": ("attribute", None),
        "M2NWeightSource.mesh": ("self", None),
        "M2NWeightSource.metadata": ("self", None),
    },
    "vllm.config.weight_transfer": {"WeightTransferConfig": "backend="},
    "vllm.entrypoints.rl.offline": {
        "RLOfflineMixin.finish_weight_update": "self, weight_version=",
        "RLOfflineMixin.init_weight_transfer_engine": "self, request",
        "RLOfflineMixin.start_weight_update": "self",
        "RLOfflineMixin.update_weights": "self, request",
    },
    "vllm.model_executor.layers.fused_moe.experts.cpu_moe": {
        "CPUUnquantizedExperts.process_weights_after_loading": "self, layer",
    },
    "vllm.model_executor.layers.quantization.online.base": {"OnlineQuantizationConfig": ""},
    "vllm.model_executor.layers.quantization.online.fp8": {
        "Fp8PerBlockOnlineLinearMethod.process_weights_after_loading": "self, layer",
        "Fp8PerBlockOnlineMoEMethod.process_weights_after_loading": "self, layer",
    },
    "vllm.model_executor.layers.utils": {"dispatch_cpu_unquantized_gemm": "layer, remove_weight"},
    "vllm.model_executor.model_loader.utils": {
        "initialize_model": "vllm_config, *, prefix=, model_class=, model_config=",
        "process_weights_after_loading": "model, model_config, target_device",
    },
    "vllm.v1.core.kv_cache_manager": {"KVCacheManager.evict_blocks": "self, block_ids"},
    "vllm.v1.core.sched.scheduler": {
        "Scheduler.get_request_counts": "self",
        "Scheduler.reset_connector_cache": "self",
        "Scheduler.reset_prefix_cache": "self, reset_running_requests=, reset_connector=",
    },
    "vllm.v1.engine.core": {
        "EngineCore.reset_encoder_cache": "self",
        "EngineCore.set_weight_version": "self, weight_version",
    },
    "vllm.v1.request": {"Request.update_block_hashes": "self"},
    "vllm.v1.worker.gpu_worker": {
        "Worker.finish_weight_update": "self",
        "Worker.init_weight_transfer_engine": "self, init_info",
        "Worker.shutdown_weight_transfer_engine": "self",
        "Worker.start_weight_update": "self",
        "Worker.update_weights": "self, update_info",
    },
}

# Run beside the Python files of a version, whose compiled parts may be missing.
_IMPORT = """
import torch, vllm
from vllm.distributed import weight_transfer
from hybridengine.remote.vllm_transfer import engine_sender, trainer, transfer
transfer.register()
transfer.register()
for factory in (weight_transfer.WeightTransferEngineFactory,
                weight_transfer.WeightTransferTrainerFactory):
    half = factory._registry["hybridengine"]()
    assert not half.__abstractmethods__, half.__abstractmethods__
source = weight_transfer.ModuleSource(torch.nn.Linear(2, 3))
assert sorted(engine_sender.sender_arguments(source).parameters()) == ["bias", "weight"]
print("imported beside vLLM", vllm.__version__, vllm.__file__)
"""


def recorded(version: str) -> Iterator[tuple[str, str, str | None]]:
    """Yield (module, name, signature) of a version in VERSIONS."""
    column = VERSIONS.index(version)
    for module, names in INTERFACE.items():
        for name, signature in names.items():
            yield module, name, signature[column] if isinstance(signature, tuple) else signature


def signature_of(root: Path, module: str, name: str) -> str | None:
    """Return the signature of `name`, as in INTERFACE; None if there is none."""
    path = root.joinpath(*module.split("."))
    path = path.with_suffix(".py") if path.with_suffix(".py").exists() else path / "__init__.py"
    if not path.exists():
        return None
    body = _parsed(path)
    *classes, last = name.split(".")
    for cls in classes:
        node = _definition(body, cls)
        if not isinstance(node, ast.ClassDef):
            return None
        body = node.body
    node = _definition(body, last)
    if node is None:
        return "attribute" if _assigns(body, last) else None
    if isinstance(node, ast.ClassDef):
        return ", ".join(_fields(node))
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        decorators = {ast.unparse(d) for d in node.decorator_list}
        return "property" if decorators & {"property", "cached_property"} else _parameters(node)
    return "value"


@cache
def _parsed(path: Path) -> list[ast.stmt]:
    return ast.parse(path.read_text()).body


def _definition(body: list[ast.stmt], name: str) -> ast.stmt | None:
    for node in body:
        if getattr(node, "name", None) == name:
            return node
        targets = getattr(node, "targets", [getattr(node, "target", None)])
        if any(getattr(target, "id", None) == name for target in targets):
            return node
    return None


def _assigns(body: list[ast.stmt], attribute: str) -> bool:
    """Whether `__init__` assigns self.<attribute>."""
    init = _definition(body, "__init__")
    nodes = ast.walk(init) if init is not None else ()
    return any(
        isinstance(n, ast.Attribute) and n.attr == attribute and isinstance(n.ctx, ast.Store)
        for n in nodes
    )


def _fields(node: ast.ClassDef) -> Iterator[str]:
    """Yield the fields of a dataclass; "config" decorates those of vLLM's configuration."""
    decorators = {ast.unparse(decorator).partition("(")[0] for decorator in node.decorator_list}
    if not decorators & {"dataclass", "config"}:
        return
    for field in node.body:
        if isinstance(field, ast.AnnAssign) and "ClassVar" not in ast.unparse(field.annotation):
            yield ast.unparse(field.target) + "=" * _has_default(field.value)


def _has_default(value: ast.expr | None) -> bool:
    if isinstance(value, ast.Call) and ast.unparse(value.func) == "field":
        return any(keyword.arg in ("default", "default_factory") for keyword in value.keywords)
    return value is not None


def _parameters(node: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    given = node.args
    positional = [*given.posonlyargs, *given.args]
    first_default = len(positional) - len(given.defaults)
    words = [p.arg + "=" * (i >= first_default) for i, p in enumerate(positional)]
    if given.vararg or given.kwonlyargs:
        words.append(f"*{given.vararg.arg if given.vararg else ''}")
    pairs = zip(given.kwonlyargs, given.kw_defaults, strict=True)
    words += [p.arg + "=" * (default is not None) for p, default in pairs]
    return ", ".join([*words, *([f"**{given.kwarg.arg}"] if given.kwarg else [])])


def version_of(path: Path) -> str:
    """Return the version in VERSIONS of a wheel, or of a folder with vLLM and its metadata.

    Raises ValueError for another one.
    """
    names = [path.name] if path.suffix == ".whl" else [p.name for p in path.glob("*.dist-info")]
    found = [m[1] for name in names if (m := re.match(r"vllm(?:_cpu)?-(\d+\.\d+)", name))]
    if not found or found[0] not in VERSIONS:
        raise ValueError(f"{path}: got vLLM {found[0] if found else '?'}, expected {VERSIONS}")
    return found[0]


@contextmanager
def _unpacked(path: Path) -> Iterator[Path]:
    """Yield a folder with the Python files of a wheel, or of a folder that has them."""
    if path.suffix != ".whl":
        yield path
        return
    with tempfile.TemporaryDirectory() as folder, zipfile.ZipFile(path) as wheel:
        wheel.extractall(folder, [name for name in wheel.namelist() if name.endswith(".py")])
        yield Path(folder)


def differences(path: Path) -> list[str]:
    """Return how a wheel, or a folder with vLLM and its metadata, differs from the record."""
    found, version = [], version_of(path)
    with _unpacked(path) as root:
        for module, name, wanted in recorded(version):
            actual = signature_of(root, module, name)
            if actual != wanted:
                found.append(f"{module}.{name}: recorded {_text(wanted)}, is {_text(actual)}")
    return found


def _text(signature: str | None) -> str:
    return "nothing" if signature is None else f"({signature})"


def import_beside(path: Path) -> bool:
    """Return whether our halves can be imported beside the Python files of a version."""
    with _unpacked(path) as root:
        command = f"import sys; sys.path.insert(0, {str(root)!r})\n{_IMPORT}"
        return subprocess.run([sys.executable, "-c", command], check=False).returncode == 0


def main(path: Path) -> int:
    if found := differences(path):
        print(*found, sep="\n")
    else:
        print(f"vLLM {version_of(path)}: {sum(map(len, INTERFACE.values()))} names as recorded")
    return 0 if import_beside(path) and not found else 1


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
