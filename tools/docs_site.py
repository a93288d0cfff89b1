"""Puts the pages of the documentation's site together: `make docs` runs it, and builds the site from the folder.

The site has the pages of docs/ at its root, beside those of the repository's root, whose README is its first page. The
files that pages link to come with them, at their places in the repository.

Usage: python tools/docs_site.py FOLDER
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from pathlib import Path, PurePosixPath

REPOSITORY = Path(__file__).resolve().parent.parent
DOCS = REPOSITORY / "docs"
ROOT_PAGES = tuple(REPOSITORY / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md"))
_LINK = re.compile(r"(\]\()([^)\s#:]+)(?=[)#])")


def place(path: Path) -> PurePosixPath:
    """Where a file of the repository lies in the site."""
    if path == REPOSITORY / "README.md":
        return PurePosixPath("index.md")
    return PurePosixPath(path.relative_to(DOCS if path.is_relative_to(DOCS) else REPOSITORY).as_posix())


def put_together(folder: Path) -> None:
    """Writes the pages, with links from place to place, and the files they link to.

    Args:
      folder: Replaced.
    """
    shutil.rmtree(folder, ignore_errors=True)
    left = [*ROOT_PAGES, *DOCS.glob("*.md"), *DOCS.glob("*.css")]
    known = set(left)

    while left:
        source = left.pop()
        target = folder / place(source)
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.suffix != ".md":
            shutil.copyfile(source, target)
            continue

        def corrected(link: re.Match[str], source: Path = source) -> str:
            linked = (source.parent / link[2]).resolve()
            if not linked.is_file() or not linked.is_relative_to(REPOSITORY):
                sys.exit(f"{source.relative_to(REPOSITORY)} links to {link[2]}, which is no file: correct the link")
            if linked not in known:
                known.add(linked)
                left.append(linked)
            return link[1] + PurePosixPath(os.path.relpath(place(linked), place(source).parent)).as_posix()

        target.write_text(_LINK.sub(corrected, source.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    put_together(Path(sys.argv[1]))
