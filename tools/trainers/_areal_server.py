"""Serve by the command that AReaL makes of its configuration, on a CPU: … MODEL PORT"""

import os
import sys

from hybridengine.integrations import areal
from tools.trainers._engines import ENGINE


def main(model: str, port: str) -> None:
    areal.patch()
    from areal.api.cli_args import vLLMConfig

    own = {"model": model, "enforce_eager": True, "max_model_len": ENGINE["max_model_len"]}
    arguments = vLLMConfig.build_args(
        vLLMConfig(**own, max_num_seqs=8, block_size=32),
        tp_size=1,
        pp_size=1,
        host="127.0.0.1",
        port=int(port),
    )
    keys = ("max_num_batched_tokens", "kv_cache_memory_bytes")
    arguments |= {key: ENGINE[key] for key in keys}
    arguments["worker_extension_cls"] = "tools.trainers._loading.areal"
    _, *words = vLLMConfig.build_cmd_from_args(arguments)
    os.execv(sys.executable, [sys.executable, *words])


if __name__ == "__main__":
    main(*sys.argv[1:])
