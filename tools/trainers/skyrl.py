"""SkyRL's FSDP policy worker, inference client and vLLM server, with our weight sync.

Real: SkyRL 0.4's `init_weight_sync_state` and `broadcast_to_inference_engines` on two FSDP2 ranks,
its HTTP client, its server with the arguments that it makes of its configuration, vLLM's workers,
`initialize_ray`, by which processes of the job are patched.
Not SkyRL's: `init_model`, which needs CUDA; the policy is sharded by `fully_shard`. flash-attn's
`bert_padding` is ours. Under Python 3.11 typing.TypedDict is that of typing_extensions.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

from tools.environments import overlay
from tools.trainers._engines import ROOT, RUN_S, check_runs, free_port, save_model, variables

REQUIREMENTS = (
    "skyrl==0.4.0",
    "skyrl-gym==0.4.0",
    "ray==2.56.0",
    "msgpack",
    "cloudpathlib",
    "jaxtyping",
    "orjson",
)
TYPED_DICT = "import typing, typing_extensions; typing.TypedDict = typing_extensions.TypedDict"


def run(folder: Path) -> dict[str, object]:
    """Run two ranks and a server of two workers; return bytes and numbers of compared weights."""
    python = overlay(folder, REQUIREMENTS, TYPED_DICT)
    stubs = folder / "stubs"
    (stubs / "flash_attn").mkdir(parents=True, exist_ok=True)
    (stubs / "flash_attn" / "__init__.py").write_text("")
    (stubs / "flash_attn" / "bert_padding.py").write_text(
        "from hybridengine.integrations.flash_attn import pad_input, unpad_input\n"
    )
    ray = [str(python), "-m", "tools.trainers._skyrl_ray", str(folder / "ray")]
    subprocess.run(ray, cwd=ROOT, env=variables([stubs]), timeout=RUN_S, check=True)
    model, port = save_model(folder), free_port()
    server = ["-m", "tools.trainers._skyrl_server", str(model), "2", str(port)]
    return {"skyrl": "0.4.0"} | check_runs(
        folder, python, "_skyrl_ranks", model, {f"http://127.0.0.1:{port}": server}, [stubs]
    )
