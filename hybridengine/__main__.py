"""The command `hybridengine`, also where `pip install .` has left out what it needs."""

import sys


def main() -> None:
    try:
        from hybridengine import cli
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] in ("", "hybridengine"):
            raise
        sys.exit(
            f"the command hybridengine needs the package {error.name!r}, which is not installed: "
            "run `pip install 'hybridengine[train]'`, in a clone `pip install '.[train]'`"
        )
    cli.app()


if __name__ == "__main__":
    main()
