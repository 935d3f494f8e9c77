"""A step of a job on a rank of torchrun: `-m tests.extras.api.calls_of_a_rank SETTINGS.json`."""

import json
import sys
from pathlib import Path

from hybridengine import Trainer
from hybridengine.train import report

if __name__ == "__main__":
    report.plugins = lambda group: {}
    settings = json.loads(Path(sys.argv[1]).read_text())
    with Trainer(settings, reward=lambda solution_str: float(len(solution_str))) as trainer:
        step = next(iter(trainer))
        rollouts = step.collect()
        norm = step.update(rollouts)["actor/grad_norm"]
        result = [len(rollouts.own), len(rollouts.outcomes), norm]
        Path(f"{sys.argv[1]}.{trainer.rank}").write_text(json.dumps(result))
