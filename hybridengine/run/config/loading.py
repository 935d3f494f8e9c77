"""YAML and overrides → a checked configuration, and back; the list of all keys.

Keys are flattened, renamed to native ones (`ForeignKeys`), checked by pydantic one by one and by
`config.validation` against each other. All faults are raised as one ConfigError.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import os
import typing
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from operator import attrgetter, getitem
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf._utils import get_omega_conf_dumper
from omegaconf.errors import OmegaConfBaseException

from hybridengine.run import load_plugin, plugins
from hybridengine.run.config.common import JobConfig, SFTConfig, keys_of
from hybridengine.run.config.rl import RLConfig
from hybridengine.run.config.settings import GivenSettings
from hybridengine.run.config.validation import find_faults, find_notes
from hybridengine.run.errors import ConfigError, ConfigNote, InvalidConfigError, is_about, located

REQUIRED = ("model.path", "data.train_files")  # keys of a job


@dataclass(frozen=True)
class JobKind:
    """A kind of job: how its configuration is loaded.

    schema: the class of the configuration.
    defaults: native key → value, where it is not the schema's own default.
    required: the keys that have to be given.
    find_faults, find_notes: yield a sentence for each setting that contradicts another, or that
      runs, but hardly as it was meant.
    """

    schema: type
    defaults: Mapping[str, Any] = field(default_factory=dict)
    required: tuple[str, ...] = REQUIRED
    find_faults: Callable[[Any], Iterator[str]] = find_faults
    find_notes: Callable[[Any], Iterator[str]] = find_notes


JOBS = {  # those of extras are in the entry-point group hybridengine.jobs
    "grpo": JobKind(RLConfig),
    "ppo": JobKind(
        RLConfig,
        {
            "algorithm.adv_estimator": "gae",
            "trainer.default_local_dir": "runs/ppo",
            "trainer.experiment_name": "ppo",
        },
    ),
    "sft": JobKind(SFTConfig),
}

Settings = str | Path | Mapping[str, Any] | None


def job_kind(name: str) -> JobKind:
    """Return a kind of job of this package or an installed extra; ConfigError for another name."""
    if name in JOBS:
        return JOBS[name]
    if name not in plugins("jobs"):
        kinds = ", ".join([*JOBS, *plugins("jobs")])
        raise ConfigError(f"kind is {name!r}, expected one of {kinds}")
    kind: JobKind = load_plugin("jobs", name, "kind")
    return kind


def load_job(kind: str, path: Settings, overrides: Sequence[str] | Mapping[str, Any] = ()) -> Any:
    """Read a YAML file (None: defaults only), apply `key=value` overrides, check everything.

    kind: of the job, such as `grpo`.
    path, overrides: may also be mappings, nested or with dotted keys, of Python values.
    A relative path of what the job reads is looked up in the working directory, one of a file
    also in the file's folder and those above it; where it exists, it becomes absolute.
    A key of another trainer without effect here is a ConfigNote warning. Raises ConfigError for an
    unreadable file, and InvalidConfigError with every other fault at once: unknown keys, wrong
    types or ranges, and settings that contradict each other.
    """
    job = job_kind(kind)
    given = GivenSettings(job.schema, dict(job.defaults))
    if isinstance(path, Mapping):
        given.add(path, "the configuration")
    elif path is not None:
        file = Path(path).expanduser()
        given.add(read_settings(file), str(path), folders=Path(os.path.abspath(file)).parents)
    if isinstance(overrides, Mapping):
        given.add(overrides, "overrides", last_wins=True)
    else:
        settings = _read_overrides(overrides, given.faults)
        given.add(settings, "the command line", last_wins=True)
    for key in job.required:
        if not given.values.get(key) and key not in given.faulty_keys:
            given.values.pop(key, None)
            given.add_fault(f"{key} is required and was not given; set it in the config", key)
    given.add_adapter()
    config = given.validated()
    crossed = itertools.chain(job.find_faults(config), given.shared_faults(config))
    given.faults += [fault for fault in crossed if not is_about(fault, given.faulty_keys)]
    if given.faults:
        keys = given.faulty_keys - given.values.keys()
        raise InvalidConfigError(config, keys, *given.faults)
    ignored = (f"ignored: {', '.join(keys)} ({why})" for why, keys in given.notes.items())
    for note in itertools.chain(job.find_notes(config), ignored):
        warnings.warn(note, ConfigNote, stacklevel=3)
    return config


def load_config(path: Settings, overrides: Sequence[str] | Mapping[str, Any] = ()) -> RLConfig:
    """Load the configuration of `hybridengine grpo`, see `load_job`."""
    config: RLConfig = load_job("grpo", path, overrides)
    return config


def load_sft_config(path: Settings, overrides: Sequence[str] | Mapping[str, Any] = ()) -> SFTConfig:
    """Load the configuration of `hybridengine sft`, see `load_job`."""
    config: SFTConfig = load_job("sft", path, overrides)
    return config


def parse_overrides(overrides: Sequence[str]) -> Mapping[str, Any]:
    """Return key → value of a list of `key=value`, in order. Raises ConfigError for other texts."""
    faults: list[str] = []
    settings = _read_overrides(overrides, faults)
    if faults:
        raise ConfigError(*faults)
    return settings


def read_settings(file: Path) -> Mapping[str, Any]:
    """Return the content of a YAML file of settings. Raises ConfigError if it cannot be read."""
    return _read(lambda: OmegaConf.load(file), f"config file {located(file)}")


def config_to_yaml(config: JobConfig) -> str:
    """Return the resolved configuration as YAML; `load_config` reads it back to an equal one."""
    # As `OmegaConf.to_yaml`, without a node for each value, which takes ten times as long.
    content, dumper = asdict(typing.cast("Any", config)), get_omega_conf_dumper()
    text: str = yaml.dump(content, Dumper=dumper, allow_unicode=True, sort_keys=False)
    return text


def overrides_of(kind: str, config: JobConfig) -> list[str]:
    """Return the `key=value` that mean `config`: the required keys, and those with no default."""
    values = {key: attrgetter(key)(config) for key, _ in keys_of(type(config))}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConfigNote)
        default = load_job(kind, None, [f"{key}={_written(values[key])}" for key in REQUIRED])
    return [
        f"{key}={_written(value)}"
        for key, value in values.items()
        if value != attrgetter(key)(default) or key in REQUIRED
    ]


def _written(value: Any) -> str:
    """Return the value as it is written behind `key=`: a plain text if it is read back as such."""
    if isinstance(value, str) and "\n" not in value:
        read = OmegaConf.to_container(OmegaConf.from_dotlist([f"key={value}"]))
        if read == {"key": value}:
            return value
    return json.dumps(value)


def _read_overrides(overrides: Sequence[str], faults: list[str]) -> dict[str, Any]:
    """Return the value of each `key=value`, in the order of the last settings of the keys.

    Hydra's `+` and `++` before a key are dropped. Appends to `faults` what is no such pair.
    """
    pairs = dict[str, str]()
    for override in overrides:
        key, equals, _ = override.partition("=")
        if override.startswith("~"):
            faults.append(f"override {override!r} would remove a key; set {key[1:]}=null instead")
        elif "[" in key:
            faults.append(f"override {override!r} sets an entry of a list; give the full list")
        elif not equals or not key.strip("+"):
            faults.append(f"override {override!r} is not `key=value`, e.g. actor.optim.lr=1e-6")
        else:
            pairs.pop(key.lstrip("+"), None)
            pairs[key.lstrip("+")] = override.lstrip("+")
    dotlist = list(pairs.values())
    tree = _read(lambda: OmegaConf.from_dotlist(dotlist), f"overrides {dotlist}")
    values = {}
    for key in pairs:
        with contextlib.suppress(KeyError, TypeError):  # a later override replaced its group
            values[key] = functools.reduce(getitem, key.split("."), tree)
    return values


def _read(read: Callable[[], Any], what: str) -> Mapping[str, Any]:
    try:
        content = OmegaConf.to_container(read(), resolve=True)
    except FileNotFoundError:
        raise ConfigError(f"{what} does not exist; check the path") from None
    except (OSError, yaml.YAMLError, UnicodeDecodeError, OmegaConfBaseException) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"{what} cannot be read as YAML: {reason}") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{what} must hold `key: value` groups, not a list")
    return typing.cast("Mapping[str, Any]", content)
