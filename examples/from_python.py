"""GRPO from Python, step by step, with a function as reward: one process, no torchrun.

python examples/demo/prepare.py; python examples/from_python.py
"""

from hybridengine import Trainer


def reward(solution_str, ground_truth):
    """Return 1 for the number alone, 0.5 for an answer that starts with it."""
    answer = solution_str.strip()
    return 1.0 if answer == ground_truth else 0.5 * answer.startswith(str(ground_truth))


def main(config="examples/demo/config.yaml", **overrides):
    one_rank = {"trainer.n_gpus_per_node": 1, "trainer.default_local_dir": "runs/from_python"}
    with Trainer(config, reward=reward, overrides={**one_rank, **overrides}) as trainer:
        for step in trainer:
            rollouts = step.collect()
            best = max(rollouts.own, key=lambda response: response.reward.score)
            metrics = step.update(rollouts)
            print(f"{step}: score {metrics['critic/score/mean']:.2f}, {best.text!r}")
    return metrics


if __name__ == "__main__":
    main()
