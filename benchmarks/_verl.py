"""verl's own algorithms, from the released package (`pip install --no-deps verl==0.9.1`).

verl imports services (Ray, its loggers) that the functions here do not use. Those that are not
installed are replaced by empty modules while verl is imported.
"""

import importlib.util
from functools import partial

from hybridengine.conformance.libraries import services

_SERVICES = ("ray", "tensordict", "codetiming", "hydra", "pylatexenc", "wandb", "orjson")
empty_services = partial(services.empty_services, _SERVICES)

if importlib.util.find_spec("verl") is None:
    raise ImportError("verl is not installed: pip install --no-deps verl==0.9.1", name="verl")
with empty_services():
    from verl.trainer.ppo import core_algos, rollout_corr_helper  # noqa: F401
    from verl.utils import seqlen_balancing, torch_functional  # noqa: F401
    from verl.utils.experimental.torch_functional import FusedLinearForPPO  # noqa: F401
    from verl.utils.kernel.linear_cross_entropy import linear_cross_entropy  # noqa: F401
    from verl.workers.config import ActorConfig  # noqa: F401
