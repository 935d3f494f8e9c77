"""The weight sync inside other trainers, run as their users run them (docs/reshard.md).

A part is a module of this package with

    def run(folder: Path) -> dict[str, object]

which makes its environment in `folder`, runs its checks, raises if one fails and returns its
results, the versions of its packages included.
"""
