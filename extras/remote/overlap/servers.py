"""Use vLLM servers in place of an engine on this rank."""

from __future__ import annotations

from transformers import PreTrainedTokenizerBase

from hybridengine.model.validation import check_model, long_rope_limit
from hybridengine.remote.build import SYNC_SHARE
from hybridengine.remote.roles import RoleLink
from hybridengine.remote.servers import (
    ServerEngine,
    ServerPool,
    ServerReceiver,
    TrainersStore,
    VllmServer,
)
from hybridengine.remote.servers.network import address_for
from hybridengine.run.config import RLConfig
from hybridengine.train.build import find_stop_token_ids, load_preparer
from hybridengine.vision.checks import find_conflicts


def connect_servers(
    config: RLConfig, tokenizer: PreTrainedTokenizerBase, link: RoleLink, *, exact: bool
) -> tuple[ServerEngine, ServerReceiver]:
    """Return this rank's share of `rollout.servers` as an engine, and what updates its weights.

    exact: whether they must have the operators of the trained model. Waits until they have started.
    Raises RolloutError where one cannot be used or does not come.
    """
    rollout, number = config.rollout, link.role.engine
    servers = [VllmServer(url, i, link.timeout_s) for i, url in enumerate(rollout.servers)]
    servers = servers[number :: link.roles.num_engines]
    limit_s = SYNC_SHARE * link.timeout_s
    model = config.model
    limit = long_rope_limit(
        check_model(model.path, model.trust_remote_code, model.config_overrides)
    )

    def join(server: VllmServer) -> None:
        server.check_settings(config.max_model_len, limit)
        if exact:
            server.check_exact(config.actor.fsdp_config.dtype)
        host, port = address_for(server.host, link.address)
        server.join(TrainersStore(host, port, f"{link.store.name}/weights", limit_s))

    most = rollout.max_num_seqs
    pool = ServerPool(servers, join, max_sequences=most, timeout_s=limit_s)
    engine = ServerEngine(
        pool,
        stop_token_ids=find_stop_token_ids(config.model.path, tokenizer),
        max_sequences=most * len(servers),
        preparer=None if find_conflicts(config) else load_preparer(config),
    )
    return engine, ServerReceiver(pool, link.store.substore("weights"))
