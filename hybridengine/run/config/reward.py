"""The group `reward` of an RL run; the rules are those of `hybridengine.run.config.common`."""

from __future__ import annotations

from dataclasses import dataclass

from pydantic import StrictBool

from hybridengine.run.config.common import (
    CodePath,
    CodePaths,
    InputPath,
    NonNegativeFloat,
    NonNegativeInt,
    Numbers,
    PositiveFloat,
    PositiveInt,
    Texts,
)


@dataclass(frozen=True)
class CustomRewardConfig:
    path: CodePaths = ()  # Python files, built-in rules or URLs; none: by data_source
    name: Texts = ("compute_score",)  # names of the functions


@dataclass(frozen=True)
class RewardModuleConfig:
    path: CodePath | None = None  # Python file with the class reward_manager.name; null: none


@dataclass(frozen=True)
class RewardManagerConfig:
    name: str = "naive"  # naive, batch, dapo, a registered name, package.module.Class
    module: RewardModuleConfig = RewardModuleConfig()


@dataclass(frozen=True)
class RewardHttpConfig:
    """Requests to the URLs among `reward.custom_reward_function.path`."""

    batch_size: PositiveInt = 64  # responses in one request
    retries: NonNegativeInt = 3  # of a request that gets no answer, or status 429 or 5xx
    backoff_s: PositiveFloat = 1.0  # wait before the first retry; doubled before each further one


@dataclass(frozen=True)
class RewardModelConfig:
    enable: StrictBool = False  # add the score of a reward model
    model_path: InputPath = ""  # sequence classifier with one label


@dataclass(frozen=True)
class OverlongBufferConfig:
    """DAPO's soft overlong penalty (arXiv 2503.14476, eq. 13)."""

    enable: StrictBool = False  # penalise responses close to the limit
    len: PositiveInt = 128  # the last tokens before data.max_response_length
    penalty_factor: NonNegativeFloat = 1.0  # penalty at the limit


@dataclass(frozen=True)
class RewardConfig:
    custom_reward_function: CustomRewardConfig = CustomRewardConfig()
    weights: Numbers | None = None  # of the functions, then of the model; null: all 1
    timeout_s: PositiveFloat = 60.0  # limit of one call of a function, or of one request
    num_workers: PositiveInt | None = None  # processes or requests per rank; null: cores / ranks
    http: RewardHttpConfig = RewardHttpConfig()
    reward_manager: RewardManagerConfig = RewardManagerConfig()
    reward_model: RewardModelConfig = RewardModelConfig()
    overlong_buffer: OverlongBufferConfig = OverlongBufferConfig()

    @property
    def functions(self) -> list[tuple[str, str]]:
        """Return (file, function name) of every reward function; one name is for all files."""
        paths, names = self.custom_reward_function.path, self.custom_reward_function.name
        if not paths and not self.reward_model.enable:
            return [("data_source", "compute_score")]
        return list(zip(paths, names * len(paths) if len(names) == 1 else names, strict=True))

    @property
    def all_weights(self) -> tuple[float, ...]:
        return self.weights or (1.0,) * (len(self.functions) + self.reward_model.enable)
