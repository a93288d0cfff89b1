"""Journal of a run: a scratch file to which each row is appended when it finishes, so that a kill loses no row.

A line is `checksum row status json`. The file's name contains the run's key, a hash of everything that answers depend
on, so rows of other settings are never used for this run. Written data survives the process. An occasional sync makes
it survive a crash of the machine.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import time
import zlib
from array import array
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast

from jaxis.errors import ConfigError, EngineError

Status = Literal["completed", "failed", "retry"]
SYNC_INTERVAL_SECONDS = 1.0
# Function from the lines of the output, each with its newline, to the output's bytes.
Formatted = Callable[[Iterator[bytes]], Iterator[bytes]]


class RowResult(NamedTuple):
    """Result of a row.

    Attributes:
      status: Outcome; "retry" is a failure that may go away: it counts as failed, and a resumed run tries it again.
    """

    row: int
    status: Status
    value: dict[str, Any]


def dump_line(value: object) -> bytes:
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except UnicodeEncodeError:  # half of a surrogate pair has no UTF-8 form, but can be escaped
        return json.dumps(value, allow_nan=False).encode()


def run_key(*parts: object) -> str:
    """Returns a hash of everything that a run's answers depend on, as 16 hexadecimal digits."""
    text = json.dumps(parts, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def scratch_path(output_path: Path, key: str) -> Path:
    return output_path.with_name(f"{output_path.name}.{key}.scratch")


def scratch_files(output_path: Path) -> list[Path]:
    """Returns the scratch files of all runs with this output."""
    folder, start = output_path.parent, f"{output_path.name}."
    found = folder.iterdir() if folder.is_dir() else ()
    return sorted(path for path in found if path.name.startswith(start) and path.name.endswith(".scratch"))


class Journal:
    """The finished rows of a run with one output file; `key` is from `run_key`, and `formatted` turns lines into its
    bytes.

    Raises ConfigError if the scratch file cannot be written, or another process is working on the same run.
    """

    def __init__(self, output_path: Path, key: str, num_rows: int, formatted: Formatted | None = None) -> None:
        self._output_path, self._formatted = output_path, formatted or iter
        self.path = scratch_path(output_path, key)
        if output_path.exists() and not output_path.is_file():
            raise ConfigError(f"output_path={output_path} is not a regular file: give another name")
        self._offsets = array("q", [-1]) * num_rows
        self._failed = bytearray(num_rows)
        self.num_completed = self.num_failed = 0
        self._last_sync = time.monotonic()
        try:
            output_path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self._open_locked()
            self._recover()
            self._forget_retries()
        except OSError as error:
            raise ConfigError(f"{self.path} cannot be written: {error.strerror}") from None

    def is_done(self, row: int) -> bool:
        return self._offsets[row] >= 0

    def append(self, results: Iterable[RowResult]) -> None:
        """Adds finished rows; after it returns, a kill does not lose them. Raises EngineError if the disk is full or
        failing.
        """
        lines = [(result, _line(result)) for result in results]
        if not lines:
            return
        start = self._end
        data = b"".join(line for _, line in lines)
        try:
            self._write(data)
            if time.monotonic() - self._last_sync > SYNC_INTERVAL_SECONDS:
                os.fsync(self._file)
                self._last_sync = time.monotonic()
        except OSError as error:
            raise EngineError(
                f"{self.path} cannot be written: {error.strerror}; finished rows are kept, and the same command goes on"
            ) from None
        for result, line in lines:
            self._count(result.row, result.status, start)
            start += len(line)

    def other_runs(self) -> list[Path]:
        """Returns scratch files of runs with the same output and other settings or data."""
        return [path for path in scratch_files(self._output_path) if path != self.path]

    def finish(self) -> None:
        """Writes the output in the order of the input, once every row has a result, and removes the scratch file.

        The output appears complete or not at all. Raises EngineError if the disk is full or failing.
        """
        temporary = self._output_path.with_name(f"{self.path.name}.tmp")
        try:
            with temporary.open("wb") as output:
                output.writelines(self._formatted(self.lines_from(0)))
                output.flush()
                os.fsync(output.fileno())
            os.replace(temporary, self._output_path)
            self.path.unlink()
        except OSError as error:
            temporary.unlink(missing_ok=True)
            raise EngineError(
                f"{self._output_path} cannot be written: {error.strerror}; finished rows are kept in {self.path}"
            ) from None
        self.close()

    def close(self) -> None:
        """Closes the scratch file, and leaves it for the next run."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _open_locked(self) -> int:
        while True:
            file = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o666)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(file)
                raise ConfigError(f"{self.path} is in use: another process is working on the same run") from None
            try:
                if os.path.samestat(os.fstat(file), os.stat(self.path)):
                    return file
            except FileNotFoundError:
                pass
            os.close(file)  # the run that held it has just finished and removed it

    def _recover(self) -> None:
        """Reads the lines of earlier processes, and cuts off a line that a killed process left incomplete."""
        end = 0
        with os.fdopen(os.dup(self._file), "rb") as lines:
            for line in lines:
                if not line.endswith(b"\n"):
                    break
                if (parsed := _parse(line, len(self._offsets))) is not None:
                    self._count(*parsed, end)
                end += len(line)
        os.ftruncate(self._file, end)
        self._end = end

    def _forget_retries(self) -> None:
        for row, failed in enumerate(self._failed):
            if failed and self._offsets[row] < 0:
                self._failed[row] = 0
                self.num_failed -= 1

    def _count(self, row: int, status: Status, offset: int) -> None:
        if self._offsets[row] >= 0:
            return
        if status == "completed":
            self.num_completed += 1
            self.num_failed -= self._failed[row]
            self._failed[row] = 0
        elif not self._failed[row]:
            self.num_failed += 1
            self._failed[row] = 1
        # A failure to be tried again has a negative offset: `finish` finds it, and it is not done.
        self._offsets[row] = -2 - offset if status == "retry" else offset

    def _write(self, data: bytes) -> None:
        os.lseek(self._file, self._end, os.SEEK_SET)
        view = memoryview(data)
        while view:
            view = view[os.write(self._file, view) :]
        self._end += len(data)

    def lines_from(self, first: int) -> Iterator[bytes]:
        """Yields the output's lines from a row on, up to the first row without a result."""
        with os.fdopen(os.dup(self._file), "rb") as lines:
            for row in range(first, len(self._offsets)):
                offset = self._offsets[row]
                if offset == -1:
                    return
                lines.seek(offset if offset >= 0 else -2 - offset)
                yield lines.readline().split(b" ", 3)[3]


def _line(result: RowResult) -> bytes:
    content = b"%d %s %s" % (result.row, result.status.encode(), dump_line(result.value))
    return b"%08x %s\n" % (zlib.crc32(content), content)


def _parse(line: bytes, num_rows: int) -> tuple[int, Status] | None:
    """Returns row and status; None for a damaged line."""
    checksum, _, content = line[:-1].partition(b" ")
    if checksum != b"%08x" % zlib.crc32(content):
        return None
    row, status, _ = content.split(b" ", 2)
    return (int(row), cast("Status", status.decode())) if int(row) < num_rows else None
