"""Prints what jaxis requires, a requirement a line, as pip reads them from a file.

    python tools/requirements.py test      # of jaxis[test]
    python tools/requirements.py --build   # what builds it, with CMake and Ninja

Installed from a file, requirements do not wait until jaxis is built. Needs nothing but Python.
"""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

PYPROJECT = Path(__file__).resolve().parent.parent / "pyproject.toml"
OWN_EXTRAS = re.compile(r"jaxis\[(.+)\]")  # of an extra that brings others


def requirements(project: dict, extra: str) -> Iterator[str]:
    """Those of an extra, with those of the extras that it brings."""
    for requirement in project["optional-dependencies"][extra]:
        if own := OWN_EXTRAS.fullmatch(requirement):
            for other in own[1].split(","):
                yield from requirements(project, other)
        else:
            yield requirement


def main() -> None:
    with PYPROJECT.open("rb") as file:
        pyproject = tomllib.load(file)
    if sys.argv[1] == "--build":
        lines = [*pyproject["build-system"]["requires"], "cmake", "ninja"]
    else:
        project = pyproject["project"]
        lines = [*project["dependencies"], *requirements(project, sys.argv[1])]
    print(*lines, sep="\n")


if __name__ == "__main__":
    main()
