"""Writes docs/models.md, and four tables of src/jaxis, from the families' declarations.

  python -m tools.supported_models           # writes them
  python -m tools.supported_models --check   # exit code 1 if one is out of date

Run it from the repository's root. tests/test_docs.py and tests/models/test_registry.py fail where they differ.
"""

from __future__ import annotations

import argparse
import sys

from tests.support.places import REPOSITORY
from tools.supported_models.page import page
from tools.supported_models.table import MODELS, family_keys, plain_ggufs, renames, table

PAGE = REPOSITORY / "docs" / "models.md"
TABLE = MODELS / "architectures.json"
PLAIN = MODELS.parent / "loading" / "gguf" / "families" / "plain.json"
RENAMES = MODELS.parent / "loading" / "gguf" / "renames.json"
KEYS = MODELS.parent / "config" / "family_keys.json"


def main() -> None:
    parser = argparse.ArgumentParser(
        "tools.supported_models", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="compare the files instead of writing them")
    check = parser.parse_args().check
    # The page is of the families in the table.
    for file, text in ((TABLE, table), (PLAIN, plain_ggufs), (RENAMES, renames), (KEYS, family_keys), (PAGE, page)):
        if not check:
            file.write_text(text(), encoding="utf-8")
        elif file.read_text(encoding="utf-8") != text():
            sys.exit(f"{file.name} is out of date: run python -m tools.supported_models")


if __name__ == "__main__":
    main()
