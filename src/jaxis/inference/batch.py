"""Batch runner: runs rows through an engine, as many at a time as it holds, and yields each as soon as it ends.

A row that cannot be read, rendered or run fails alone. If a step fails, all rows in the engine are lost; each of them
then runs once more alone, so that only the faulty row fails.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterator
from dataclasses import asdict, dataclass
from typing import Any

from jaxis.engine.engine import LLMEngine
from jaxis.engine.grammar.matcher import Grammar
from jaxis.engine.output_processor import Request
from jaxis.errors import EngineError, JaxisError
from jaxis.host.interrupt import interrupt_deferred
from jaxis.jsonl.source import Row
from jaxis.outputs import RequestOutput
from jaxis.prompts import TokenizedPrompt
from jaxis.sampling_params import SamplingParams

# After this many consecutive failures of single rows, the engine is considered faulty, not the rows.
MAX_FAILED_STEPS = 3


@dataclass(frozen=True)
class RowFailure:
    """Reason why a row has no answer.

    Attributes:
      retryable: True if the same row may succeed another time.
    """

    message: str
    type: str
    retryable: bool

    @classmethod
    def of(cls, error: Exception, *, retryable: bool = False) -> RowFailure:
        message = " ".join(str(error).split()) or type(error).__name__
        if not isinstance(error, JaxisError):
            message = f"{type(error).__name__}: {message}"
        return cls(message, type(error).__name__, retryable)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


Prepare = Callable[[Row], tuple[TokenizedPrompt, SamplingParams, Grammar | None]]
Finished = tuple[Row, RequestOutput | RowFailure]


def run_rows(engine: LLMEngine, rows: Iterator[Row], prepare: Prepare) -> Generator[list[Finished], None, None]:
    """Yields finished rows, step by step; a step's list may be empty.

    Rows are taken from the iterator when the engine has room; at most two engines full are held. Closing the generator
    aborts running rows.

    Nothing else may step the engine meanwhile. An exception of `prepare`, which reads a row, fails that row. Raises
    EngineError if several steps with one row each failed consecutively.
    """
    batch = _Batch(engine, rows, prepare)
    try:
        while batch.admit():
            yield batch.step()
    finally:
        batch.abort()


class _Batch:
    def __init__(self, engine: LLMEngine, rows: Iterator[Row], prepare: Prepare) -> None:
        self._engine = engine
        self._rows = rows
        self._prepare = prepare
        self._max_sequences = 2 * engine.runner.num_ranks * engine.vllm_config.scheduler_config.max_num_seqs
        self._running: dict[str, tuple[Row, Request]] = {}
        self._lost: deque[Row] = deque()  # from a failed step; each runs once more, alone
        self._done: list[Finished] = []
        self._num_failed_steps = 0

    def admit(self) -> bool:
        """Fills the engine; returns whether anything is left to do or to report."""
        if self._lost:
            if not self._running:
                self._add(self._lost.popleft())
            return True
        while self._num_sequences() < self._max_sequences and len(self._done) < self._max_sequences:
            row = next(self._rows, None)
            if row is None:
                break
            self._add(row)
        return bool(self._running or self._done)

    def step(self) -> list[Finished]:
        if self._running:
            try:
                with interrupt_deferred():
                    requests = self._engine.step()
            except EngineError as error:
                self._step_failed(error)
            else:
                for request in requests:
                    self._take(request)
        done, self._done = self._done, []
        return done

    def abort(self) -> None:
        with interrupt_deferred():
            for request_id in self._running:
                self._engine.abort_request(request_id)
        self._running = {}

    def _num_sequences(self) -> int:
        return sum(request.params.n for _, request in self._running.values())

    def _add(self, row: Row) -> None:
        if row.error is not None:
            self._done.append((row, RowFailure.of(row.error)))
            return
        try:
            prompt, params, grammar = self._prepare(row)
            with interrupt_deferred():
                self._engine.connector.fetch(prompt.token_ids, prompt.cache_salt, params)
                request = self._engine.add_request(
                    f"row-{row.index}",
                    prompt.token_ids,
                    params,
                    prompt=prompt.text,
                    cache_salt=prompt.cache_salt,
                    inputs=prompt.inputs,
                    grammar=grammar,
                )
                self._running[request.request_id] = (row, request)
        except Exception as error:  # a row may contain anything that breaks a template or tokenizer
            self._done.append((row, RowFailure.of(error)))

    def _take(self, request: Request) -> None:
        if not request.finished or request.request_id not in self._running:
            return
        row, _ = self._running.pop(request.request_id)
        self._num_failed_steps = 0
        self._done.append((row, request.output() if request.error is None else RowFailure.of(request.error)))

    def _step_failed(self, error: EngineError) -> None:
        rows = [row for row, _ in self._running.values()]
        self._running = {}
        if len(rows) > 1:
            self._lost.extend(rows)
            return
        self._num_failed_steps += 1
        if self._num_failed_steps >= MAX_FAILED_STEPS:
            raise error
        self._done.append((rows[0], RowFailure.of(error, retryable=True)))
