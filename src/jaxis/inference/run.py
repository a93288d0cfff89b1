"""Runs of rows through the engine into a sink."""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, Protocol

from jaxis.engine.argument_groups.fields import argument_infos
from jaxis.engine.engine import LLMEngine
from jaxis.engine.grammar.matcher import Grammar
from jaxis.errors import EngineError
from jaxis.host.interrupt import interrupt_deferred
from jaxis.host.progress import ProgressDisplay
from jaxis.inference.batch import RowFailure, run_rows
from jaxis.inference.journal import Formatted, Journal, RowResult
from jaxis.inference.run_progress import shown_progress
from jaxis.jsonl.source import Row, RowSource
from jaxis.outputs import RequestOutput
from jaxis.prompts import TokenizedPrompt
from jaxis.sampling_params import SamplingParams
from jaxis.version import __version__


class RowTask(Protocol):
    """Preparation of rows, and conversion of their results."""

    def prepare(self, row: Row) -> tuple[TokenizedPrompt, SamplingParams, Grammar | None]:
        """Returns prompt, parameters, and the compiled grammar (None: the engine compiles it); an exception fails the
        row.
        """
        ...

    def answer(self, row: Row, output: RequestOutput) -> dict[str, Any]: ...

    def failure(self, row: Row, failure: RowFailure) -> dict[str, Any]: ...


class MemorySink:
    """Keeps results in a list."""

    def __init__(self, num_rows: int) -> None:
        self.values: list[dict[str, Any]] = [{}] * num_rows
        self.num_completed = self.num_failed = 0

    def is_done(self, _row: int) -> bool:
        return False

    def append(self, results: list[RowResult]) -> None:
        for row, status, value in results:
            self.values[row] = value
            self.num_completed += status == "completed"
            self.num_failed += status != "completed"


class StreamSink:
    """Writes results to a stream in order. Results that wait for earlier ones are in a temporary file."""

    def __init__(self, stream: BinaryIO, num_rows: int) -> None:
        self._stream = stream
        self._folder = tempfile.TemporaryDirectory(prefix="jaxis-")
        self._waiting = Journal(Path(self._folder.name) / "output", "rows", num_rows)
        self._num_written = 0

    @property
    def num_completed(self) -> int:
        return self._waiting.num_completed

    @property
    def num_failed(self) -> int:
        return self._waiting.num_failed

    def is_done(self, _row: int) -> bool:
        return False

    def append(self, results: list[RowResult]) -> None:
        if not results:
            return
        self._waiting.append(results)
        try:
            for line in self._waiting.lines_from(self._num_written):
                self._stream.write(line)
                self._num_written += 1
            self._stream.flush()
        except BrokenPipeError:
            raise  # the reader closed the pipe on purpose, as head does
        except OSError as error:
            raise EngineError(
                f"the output cannot be written: {error.strerror}; with a file as output, a run goes on where it stopped"
            ) from None

    def close(self) -> None:
        self._waiting.close()
        self._folder.cleanup()


@dataclass(frozen=True)
class RunSummary:
    """The outcome of a run: numbers of rows in total, with an answer, and with an error."""

    total: int
    completed: int
    failed: int


class Answered(NamedTuple):
    """Finished rows, and the number of tokens generated for them."""

    results: list[RowResult]
    num_tokens: int


# Function from rows, taken as there is room for them, to finished rows. Closing the generator ends running rows.
AnswerRows = Callable[[Iterator[Row]], Generator[Answered, None, None]]


def answer_rows(engine: LLMEngine, task: RowTask, rows: Iterator[Row]) -> Generator[Answered, None, None]:
    """Yields the rows that each step finished, failed ones included.

    Raises EngineError after `MAX_FAILED_STEPS` steps one after the other, of one row each, that failed.
    """
    with closing(run_rows(engine, rows, task.prepare)) as steps:
        for finished in steps:
            results, num_tokens = [], 0
            for row, outcome in finished:
                results.append(_result(task, row, outcome))
                if isinstance(outcome, RequestOutput):
                    num_tokens += sum(len(completion.token_ids) for completion in outcome.outputs)
            yield Answered(results, num_tokens)


def run(
    answers: AnswerRows,
    source: RowSource,
    sink: Journal | MemorySink | StreamSink,
    *,
    display: ProgressDisplay,
    progress_path: Path | None = None,
) -> RunSummary:
    """Runs every row that the sink does not have yet.

    Raises ConfigError or EngineError if a file cannot be written, or the engine fails for every row.
    """
    num_tokens = 0
    rows = source.rows(lambda index: not sink.is_done(index))
    with (
        shown_progress(source.num_rows, display, progress_path) as update,
        closing(answers(rows)) as steps,
    ):
        for answered in steps:
            num_tokens += answered.num_tokens
            with interrupt_deferred():
                sink.append(answered.results)
            update(sink.num_completed, sink.num_failed, num_tokens)
    return RunSummary(source.num_rows, sink.num_completed, sink.num_failed)


def with_row_seed(params: SamplingParams, key: str, row: Row) -> SamplingParams:
    """Gives a row without a seed its own, so that answers do not depend on when, or with which others, it runs."""
    if params.greedy or params.seed is not None:
        return params
    seed = int.from_bytes(hashlib.sha256(f"{key}:{row.index}".encode()).digest()[:8], "big")
    return replace(params, seed=seed)


_FILES_READ = (".json", ".jinja", ".safetensors", ".txt", ".model", ".gguf")


def model_identity(folder: Path, arguments: Mapping[str, Any]) -> list[Any]:
    """Returns the values that answers depend on: jaxis, the checkpoint's files, and arguments that change more than
    speed.

    Weights are identified by size and modification time, not read.
    """
    files = []
    # Files in subfolders too: sentence-transformers stores its last layers there.
    for path in sorted((*folder.glob("*"), *folder.glob("*/*"))) if folder.is_dir() else [folder]:
        if path.suffix in _FILES_READ and path.is_file():
            status = path.stat()
            files.append((path.relative_to(folder).as_posix(), status.st_size, status.st_mtime_ns))
    infos = argument_infos()
    effective = {
        name: content_of(value) for name, value in arguments.items() if value is not None and not infos[name].speed_only
    }
    return [__version__, files, effective]


def content_of(value: object) -> object:
    """Returns a file's content if the value names a file, else the value."""
    return Path(value).read_text("utf-8") if isinstance(value, str) and os.path.isfile(value) else value


def run_to_output(
    answers: AnswerRows,
    source: RowSource,
    output: Path | BinaryIO,
    key: str,
    *,
    display: ProgressDisplay,
    progress_path: Path | None,
    formatted: Formatted | None = None,
) -> RunSummary:
    """Runs a source into a file, resuming where an earlier process stopped (see `Journal`), or into a stream."""
    if not isinstance(output, Path):
        with closing(StreamSink(output, source.num_rows)) as sink:
            return run(answers, source, sink, display=display, progress_path=progress_path)
    journal = Journal(output, key, source.num_rows, formatted)
    try:
        if others := journal.other_runs():
            display.note(f"jaxis: {others[0]} holds rows of other settings or data, which this run does not use")
        if kept := journal.num_completed + journal.num_failed:
            display.note(f"jaxis: going on after {kept} of {source.num_rows} rows")
        summary = run(answers, source, journal, display=display, progress_path=progress_path)
        journal.finish()
    except KeyboardInterrupt:
        kept = journal.num_completed + journal.num_failed
        display.note(f"jaxis: interrupted after {kept} of {source.num_rows} rows; the same command goes on from there")
        raise
    finally:
        journal.close()
    return summary


def _result(task: RowTask, row: Row, outcome: RequestOutput | RowFailure) -> RowResult:
    if isinstance(outcome, RequestOutput):
        try:
            return RowResult(row.index, "completed", task.answer(row, outcome))
        except Exception as error:  # one row's content must not lose the others
            outcome = RowFailure.of(error)
    return RowResult(row.index, "retry" if outcome.retryable else "failed", task.failure(row, outcome))
