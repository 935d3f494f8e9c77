"""Start Ray as SkyRL does, and ask a process of the job which backend its servers would get."""

import sys

from hybridengine.integrations import skyrl


def main(folder: str) -> None:
    skyrl.patch()
    import ray
    from skyrl.train.config import SkyRLTrainConfig
    from skyrl.train.utils.utils import initialize_ray

    config = SkyRLTrainConfig()
    config.trainer.log_path = folder
    initialize_ray(config)

    @ray.remote(num_cpus=0)
    def backend() -> str:
        from skyrl.backends.skyrl_train.weight_sync import get_vllm_receive_backend

        return str(get_vllm_receive_backend("nccl", colocate_all=True))

    found = ray.get(backend.remote())
    ray.shutdown()
    if found != "hybridengine":
        raise RuntimeError(f"a process that Ray started is not patched: {found!r}")


if __name__ == "__main__":
    main(*sys.argv[1:])
