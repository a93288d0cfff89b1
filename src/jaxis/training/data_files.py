"""Files of data rows: JSONL, CSV and parquet, alone or as a folder."""

from __future__ import annotations

import csv
import hashlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias

from jaxis.errors import ConfigError, RequestError
from jaxis.host.extras import check_extra
from jaxis.jsonl.source import JSONLSource

CSV, PARQUET = ".csv", ".parquet"
SUFFIXES = (".jsonl", CSV, PARQUET)
# A row's place in its file, and its columns or the reason why it has none.
RawRow: TypeAlias = tuple[str, Mapping[str, Any] | RequestError]


def files_of(path: Path) -> list[Path]:
    """Returns a file, or the data files of a folder by name. Raises ConfigError if a folder has none."""
    if not path.is_dir():
        return [path]
    files = sorted(file for file in path.rglob("*") if file.suffix in SUFFIXES and file.is_file())
    if not files:
        raise ConfigError(f"{path} has no data files: a folder needs files that end in {', '.join(SUFFIXES)}")
    return files


def read_file(path: Path) -> tuple[Iterator[RawRow], str]:
    """Returns the rows of a file, read by its suffix as they are asked for, and the digest of its content.

    Raises ConfigError, now or when a row is asked for, if the file cannot be read.
    """
    if path.suffix not in (CSV, PARQUET):
        source = JSONLSource(path, None)
        return _json_rows(source), source.digest
    if path.suffix == PARQUET:
        check_extra("parquet", str(path))
    try:
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    return (_csv_rows if path.suffix == CSV else _parquet_rows)(path), digest


def _json_rows(source: JSONLSource) -> Iterator[RawRow]:
    for row in source.rows(lambda _: True):
        fault = None if row.error is None else RequestError(str(row.error).removeprefix(f"line {row.line}: "))
        yield f"{source.path}, line {row.line}", row.value if fault is None else fault


def _csv_rows(path: Path) -> Iterator[RawRow]:
    """Reads the rows below a line of names. Empty cells are columns that a row does not have."""
    csv.field_size_limit(1 << 30)
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.DictReader(file, strict=True)
            for number, row in enumerate(reader, start=1):
                where = f"{path}, row {number}"
                if None in row or None in row.values():
                    yield (
                        where,
                        RequestError(f"has another number of cells than the {len(reader.fieldnames or ())} names"),
                    )
                else:
                    yield where, {name: cell for name, cell in row.items() if cell}
    except (csv.Error, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not CSV in UTF-8: {error}") from None


def _parquet_rows(path: Path) -> Iterator[RawRow]:
    """Reads the rows. Fields without a value are left out at any depth: all objects of a column have the same ones."""
    import pyarrow
    import pyarrow.parquet

    number = 0
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=1024):
                for row in batch.to_pylist():
                    number += 1
                    yield f"{path}, row {number}", _without_nulls(row)
    except (pyarrow.ArrowException, OSError) as error:
        raise ConfigError(f"{path} is not parquet that can be read: {str(error).splitlines()[0]}") from None


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value
