"""Writes docs/models.md.

  python -m tools.supported_models           # writes the page
  python -m tools.supported_models --check   # exit code 1 if the page is out of date

Run it from the repository's root. tests/test_docs.py fails where the page and the table differ.
"""

from __future__ import annotations

import argparse
import sys

from tests.support.places import REPOSITORY
from tools.supported_models.page import page

PAGE = REPOSITORY / "docs" / "models.md"


def main() -> None:
    parser = argparse.ArgumentParser(
        "tools.supported_models", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="compare the page instead of writing it")
    text = page()
    if not parser.parse_args().check:
        PAGE.write_text(text, encoding="utf-8")
    elif PAGE.read_text(encoding="utf-8") != text:
        sys.exit(f"{PAGE.name} is out of date: run python -m tools.supported_models")


if __name__ == "__main__":
    main()
