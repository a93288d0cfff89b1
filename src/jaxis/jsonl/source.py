"""Rows of a run: JSON objects from a JSONL file or from memory, read one at a time."""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
import tempfile
import uuid
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import numpy as np

from jaxis.errors import ConfigError, RequestError

_ID_NAMESPACE = uuid.UUID("9f0c7c2e-6a55-5e0b-9d57-0d6a3d8f5b11")


@dataclass(frozen=True)
class Row:
    """One row of the input.

    Attributes:
      index: Index of the row, from 0; blank lines are not counted.
      id: The row's own id, or one made from its index and content.
      error: Reason why it cannot be used; None if it can.
      line: Line number, from 1; 0 for a row from memory.
    """

    index: int
    value: Mapping[str, Any]
    id: str
    error: RequestError | None = None
    line: int = 0


class RowSource(Protocol):
    """A source of rows, with a hash of all rows."""

    num_rows: int
    digest: str

    def rows(self, wanted: Callable[[int], bool]) -> Iterator[Row]:
        """Yields the rows whose indices are wanted, in order."""
        ...


class JSONLSource:
    """A JSONL file, read once to check it and once to run it. One line at a time is in memory.

    `id_key` is the key of a row's id ("conversation_id" or "custom_id"); None needs no ids. `string_key` is the key
    under which a line that is a JSON string is stored; None makes such a line an error. Raises ConfigError if the file
    cannot be read, is also the output, or two rows have the same id.
    """

    def __init__(
        self,
        path: Path,
        id_key: str | None,
        *,
        output: Path | BinaryIO | None = None,
        string_key: str | None = None,
    ) -> None:
        self.path = path
        self._id_key, self._string_key = id_key, string_key
        digest = hashlib.sha256()
        hashes = array("Q")
        self.num_rows = 0
        for _, line in lines_of(self.path):
            digest.update(line.strip() + b"\n")
            self.num_rows += 1
            if id_key is not None and (row_id := _parse(line)[0].get(id_key)) is not None:
                hashes.append(_hash(str(row_id)))
        if isinstance(output, Path) and output.exists() and output.samefile(path):
            raise ConfigError(f"output_path={output} is the input: give another file")
        self.digest = digest.hexdigest()
        # 8 bytes per row; the ids themselves would take a hundred.
        values, counts = np.unique(np.frombuffer(hashes, np.uint64), return_counts=True)
        if repeated := {int(value) for value in values[counts > 1]}:
            self._check_repeated(repeated, str(id_key))

    def rows(self, wanted: Callable[[int], bool]) -> Iterator[Row]:
        for index, (number, line) in enumerate(lines_of(self.path)):
            if wanted(index):
                row = replace(parse_row(index, line, self._id_key, self._string_key), line=number)
                yield row if row.error is None else replace(row, error=RequestError(f"line {number}: {row.error}"))

    def _check_repeated(self, hashes: set[int], id_key: str) -> None:
        seen: dict[str, int] = {}
        for number, line in lines_of(self.path):
            row_id = _parse(line)[0].get(id_key)
            if row_id is None or _hash(str(row_id)) not in hashes:
                continue
            if (first := seen.setdefault(str(row_id), number)) != number:
                raise ConfigError(
                    f"{self.path}: lines {first} and {number} have the same {id_key} {row_id!r}: make them differ"
                )


class ListSource:
    """Rows in memory. Raises ConfigError if two rows have the same id."""

    def __init__(self, values: Sequence[Mapping[str, Any]], id_key: str) -> None:
        self._values = values
        self._id_key = id_key
        self.num_rows = len(values)
        seen: dict[str, int] = {}
        digest = hashlib.sha256()
        for i, value in enumerate(values):
            digest.update(_canonical(value) + b"\n")
            row_id = value.get(id_key)
            if row_id is not None and (first := seen.setdefault(str(row_id), i)) != i:
                raise ConfigError(f"rows {first} and {i} have the same {id_key} {row_id!r}: make them differ")
        self.digest = digest.hexdigest()

    def rows(self, wanted: Callable[[int], bool]) -> Iterator[Row]:
        for index, value in enumerate(self._values):
            if wanted(index):
                yield Row(index, value, _row_id(value, index, self._id_key, _canonical(value)))


@contextmanager
def spooled_stdin() -> Iterator[Path]:
    """Copies all of stdin to a temporary file, since it is read twice. No answer contains the file's name."""
    with tempfile.NamedTemporaryFile(prefix="jaxis-stdin-", suffix=".jsonl") as file:
        source: BinaryIO = sys.stdin.buffer
        shutil.copyfileobj(source, file)
        file.flush()
        yield Path(file.name)


def lines_of(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yields the number, from 1, and the content of each line that is not blank. Raises ConfigError."""
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield number, line
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None


def parse_row(index: int, line: bytes, id_key: str | None, string_key: str | None = None) -> Row:
    """Parses the row in a line of JSON, which may be invalid, with the keys of `JSONLSource`."""
    value, error = _parse(line, string_key)
    return Row(index, value, _row_id(value, index, id_key, line), error)


def _parse(line: bytes, string_key: str | None = None) -> tuple[dict[str, Any], RequestError | None]:
    try:
        value = json.loads(line.decode("utf-8-sig"), parse_constant=_refuse_constant)
    except UnicodeDecodeError:
        return {}, RequestError("the row is not UTF-8 text")
    except json.JSONDecodeError as error:
        return {}, RequestError(f"the row is not JSON: {error.msg} at column {error.colno}")
    except (ValueError, RecursionError) as error:
        return {}, RequestError(f"the row is not JSON that can be read: {error}")
    if isinstance(value, str) and string_key is not None:
        value = {string_key: value}
    if not isinstance(value, dict):
        return {}, RequestError(f"the row is not a JSON object but {type(value).__name__}")
    return value, None


def _canonical(value: Mapping[str, Any]) -> bytes:
    return json.dumps(value, sort_keys=True, default=str).encode()


def _row_id(value: Mapping[str, Any], index: int, id_key: str | None, content: bytes) -> str:
    row_id = None if id_key is None else value.get(id_key)
    if isinstance(row_id, str):
        return row_id
    name = f"{index}:{hashlib.sha256(content.strip()).hexdigest()}"
    return str(uuid.uuid5(_ID_NAMESPACE, name))


def _hash(row_id: str) -> int:
    return int.from_bytes(hashlib.blake2b(row_id.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "big")


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON number")
