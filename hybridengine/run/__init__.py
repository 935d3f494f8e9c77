"""What every job needs: configuration, ranks and their failures, tracking, storage, plugins.

Optional parts register themselves by entry points of an installed distribution.

    [project.entry-points."hybridengine.commands"]
    mine = "my_package.commands:app"

The core names a group and never a module. The groups are listed in docs/extending.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from hybridengine.run.errors import ConfigError


@cache
def plugins(group: str) -> Mapping[str, EntryPoint]:
    """Return what is registered in the group `hybridengine.<group>`, by name, not yet imported.

    Raises ConfigError where two packages register unlike parts under one name.
    """
    found = dict[str, EntryPoint]()
    for entry in entry_points(group=f"hybridengine.{group}"):
        other = found.setdefault(entry.name, entry)
        if other.value != entry.value:
            raise ConfigError(
                f"two installed packages register `{entry.name}` in the entry-point group "
                f"hybridengine.{group}: {other.value} and {entry.value}; uninstall one of them"
            )
    return dict(sorted(found.items()))


def load_plugin(group: str, name: str, key: str) -> Any:
    """Import and return what is registered as `name`.

    key: the configuration key that asks for it, which the error names.
    """
    known = plugins(group)
    if name not in known:
        raise ConfigError(
            f"{key} needs `{name}`, which no installed package registers in the entry-point group "
            f"hybridengine.{group}; registered are: {', '.join(known) or 'none'}. "
            "Install hybridengine with its extras/ again (`pip install .`)."
        )
    return known[name].load()
