"""Link the package together as an installation has it: kernels/ and extras/ inside hybridengine/.

python -m tools.package_links FOLDER      # makes FOLDER/hybridengine
"""

from __future__ import annotations

import contextlib
import shutil
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]


def folders_beside() -> list[Path]:
    """Return the folders that setup.py installs as packages inside `hybridengine`."""
    return [ROOT / "kernels", *(x for x in sorted((ROOT / "extras").iterdir()) if x.is_dir())]


def write_entry_points(folder: Path) -> Path:
    """Register in `folder`, which is to be on sys.path, what an installation registers; return it.

    What is optional is found by entry points, which sources that are linked do not have.
    """
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    metadata = folder / f"{project['name']}-{project.get('version', 0)}.dist-info"
    metadata.mkdir(parents=True, exist_ok=True)
    (metadata / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project.get('version', 0)}\n"
    )
    groups = project["entry-points"]
    lines = [
        f"[{group}]\n" + "".join(f"{name} = {value}\n" for name, value in entries.items())
        for group, entries in groups.items()
    ]
    (metadata / "entry_points.txt").write_text("\n".join(lines))
    return folder


def link_package(folder: Path) -> None:
    """Make `folder`/hybridengine anew, of links."""
    package = folder / "hybridengine"
    shutil.rmtree(package, ignore_errors=True)
    package.mkdir(parents=True)
    for path in [*(ROOT / "hybridengine").iterdir(), *folders_beside()]:
        (package / path.name).symlink_to(path)


@contextlib.contextmanager
def linked_in_place() -> Iterator[None]:
    """Make the sources importable from their folder; links that were there stay."""
    links = {ROOT / "hybridengine" / path.name: path for path in folders_beside()}
    made = {link: path for link, path in links.items() if not link.exists()}
    for link, path in made.items():
        link.symlink_to(path)
    try:
        yield
    finally:
        for link in made:
            link.unlink()


if __name__ == "__main__":
    link_package(Path(sys.argv[1]))
