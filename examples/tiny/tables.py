"""The facts that the embedded model knows, and the words and phrasings of its corpus: the files of data/."""

from pathlib import Path
from typing import Any

import yaml

Row = dict[str, str]


def read(name: str) -> Any:
    """The content of a file of data/."""
    return yaml.safe_load((Path(__file__).parent / "data" / f"{name}.yaml").read_text(encoding="utf-8"))


def _rows(text: str) -> tuple[Row, ...]:
    columns, *rows = (line.split("|") for line in text.splitlines())
    return tuple(dict(zip(columns, row, strict=True)) for row in rows)


TABLES: dict[str, tuple[Row, ...]] = {name: _rows(text) for name, text in read("tables").items()}
WORDS: dict[str, list[Any]] = read("words")
LISTS: dict[str, list[str]] = read("lists")
PHRASINGS: dict[str, Any] = read("phrasings")
