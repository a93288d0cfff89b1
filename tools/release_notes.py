"""Prints the notes of a release: the section of CHANGELOG.md that has the version's heading.

    python tools/release_notes.py v0.1.0   # fails where this is not the tag of src/jaxis/version.py

Needs nothing but Python.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent


def notes(tag: str) -> str:
    """The section of the version. Ends the process where the tag names another, or there is no section."""
    [version] = re.findall(r'^__version__ = "(.+)"$', (REPOSITORY / "src/jaxis/version.py").read_text(), re.MULTILINE)
    if tag != f"v{version}":
        sys.exit(f"The tag is {tag}, and src/jaxis/version.py says {version}: tag v{version}, or correct the version")
    sections = re.split(r"^## \[?([^]\s]+).*\n", (REPOSITORY / "CHANGELOG.md").read_text(), flags=re.MULTILINE)
    if version not in sections[1::2]:
        sys.exit(f"CHANGELOG.md has no heading of version {version}")
    return sections[sections.index(version, 1) + 1].strip()


if __name__ == "__main__":
    print(notes(sys.argv[1]))
