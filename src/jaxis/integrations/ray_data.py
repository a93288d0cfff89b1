"""Batch inference on several replicas: a stage for `Dataset.map_batches`, and the implementation of `--replicas`.

dataset = ray.data.read_text("conversations.jsonl")
dataset.map_batches(ConversationAnswers, fn_constructor_kwargs={"model": {...}}, batch_size=256, concurrency=2)
"""

from __future__ import annotations

import itertools
import json
import logging
import math
import os
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import pyarrow
import ray
import ray.data
import ray.exceptions

from jaxis.engine.engine import LLMEngine
from jaxis.engine.model_params import ModelParams
from jaxis.errors import EngineError, JaxisError, RequestError
from jaxis.inference.engine import ConversationTask, JAXInferenceEngine
from jaxis.inference.generation_params import GenerationParams
from jaxis.inference.journal import RowResult
from jaxis.inference.run import Answered, RowTask, answer_rows
from jaxis.integrations.ray_replicas import resources_of_replica, use_reserved_cpus
from jaxis.jsonl.source import Row, parse_row

# Opens a model in a replica, and returns its task for each row.
OpenTask = Callable[[], tuple[LLMEngine, RowTask]]
# A replica answers one chunk after another, and its batch drains at the end of each.
_CHUNKS_PER_REPLICA = 4
_MOST_ROWS = 256  # in a chunk: the rows that are lost, and computed again, if a replica dies


class ConversationAnswers:
    """Answers conversations: a class for `Dataset.map_batches`, whose actors are the replicas.

    Args:
      model: Model to open; see `ModelParams`.
      generation: Sampling of answers; see `GenerationParams`. Without a seed, sampled answers differ each time.
    """

    def __init__(
        self, model: ModelParams | Mapping[str, Any], generation: GenerationParams | Mapping[str, Any] | None = None
    ) -> None:
        self._engine, self._task = open_conversations(ModelParams.of(model), GenerationParams.of(generation or {}))

    def __call__(self, batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Answers a batch.

        Args:
          batch: Its column "text" holds conversations as lines of JSON, as in the input of `jaxis infer`.

        Returns:
          The batch, with the lines that `jaxis infer` would write; rows without an answer have metadata.error.
        """
        rows = (parse_row(i, str(text).encode(), "conversation_id") for i, text in enumerate(batch["text"]))
        texts = np.empty(len(batch["text"]), object)
        for result in itertools.chain.from_iterable(
            answered.results for answered in answer_rows(self._engine, self._task, rows)
        ):
            texts[result.row] = json.dumps(result.value, ensure_ascii=False)
        return {**batch, "text": texts}


def open_conversations(
    model: ModelParams, generation: GenerationParams, key: str | None = None
) -> tuple[LLMEngine, RowTask]:
    """Opens a model for conversations in a replica.

    Args:
      model: Model to open.
      generation: Sampling of answers.
      key: Key of the run, from which rows get seeds; None: no seeds.
    """
    use_reserved_cpus()
    engine = JAXInferenceEngine(model, show_progress=False)
    return engine.llm.engine, ConversationTask(engine, generation, key=key)


class _ChunkAnswers:
    """Answers chunks of a run's rows. Each chunk is one row of the dataset, in JSON."""

    def __init__(self, open_task: OpenTask) -> None:
        self._engine, self._task = open_task()

    def __call__(self, batch: dict[str, np.ndarray]) -> dict[str, list[bytes]]:
        return {"chunk": [self._answer(chunk) for chunk in batch["chunk"]]}

    def _answer(self, chunk: bytes) -> bytes:
        rows = (
            Row(index, value, name, None if error is None else RequestError(error))
            for index, value, name, error in json.loads(chunk)
        )
        answered = list(answer_rows(self._engine, self._task, rows))
        results = [result for each in answered for result in each.results]
        return json.dumps([results, sum(each.num_tokens for each in answered)]).encode()


def answer_on_replicas(
    open_task: OpenTask, num_replicas: int, num_devices: int, num_rows: int, rows: Iterator[Row]
) -> Generator[Answered, None, None]:
    """Yields finished rows, chunk by chunk in any order. If a replica dies, another one gets its chunk.

    Args:
      open_task: Opens the model; called in each replica.
      num_replicas: Number of replicas; each gets an equal share of the cluster's processors.
      num_devices: Number of accelerators of each replica.
      num_rows: Upper limit of the number of rows.
      rows: Rows to run; all of them are read at once, into Ray's object store.

    Raises:
      ConfigError: The cluster is too small.
      EngineError: A model could not be opened, or fails for every row.
    """
    size = max(1, min(_MOST_ROWS, math.ceil(num_rows / (num_replicas * _CHUNKS_PER_REPLICA))))
    with _cluster():
        resources = resources_of_replica(num_replicas, num_devices)
        ray.data.DataContext.get_current().enable_progress_bars = False  # the run has one of its own
        logging.getLogger("ray.data").setLevel(logging.CRITICAL)  # its reports are raised, too
        chunks = []
        while chunk := list(itertools.islice(rows, size)):
            fields = [(row.index, row.value, row.id, row.error and str(row.error)) for row in chunk]
            chunks.append(ray.put(pyarrow.table({"chunk": [json.dumps(fields).encode()]})))
        if not chunks:
            return
        answers = ray.data.from_arrow_refs(chunks).map_batches(
            _ChunkAnswers,
            fn_constructor_args=(open_task,),
            batch_size=1,
            compute=ray.data.ActorPoolStrategy(size=num_replicas),
            **resources,
        )
        try:
            for answered in answers.iter_rows():
                results, num_tokens = json.loads(answered["chunk"])
                yield Answered([RowResult(*result) for result in results], num_tokens)
        except ray.exceptions.RayError as error:
            raise EngineError(f"the replicas have failed: {_reason(error)}") from None


@contextmanager
def _cluster() -> Iterator[None]:
    """Connects to the cluster of RAY_ADDRESS, or starts one on this machine for the duration of the block."""
    if ray.is_initialized():
        yield
        return
    os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")
    ray.init(log_to_driver=False, logging_level=logging.ERROR)
    try:
        yield
    finally:
        ray.shutdown()


def _reason(error: BaseException) -> str:
    """Returns one line: the message of a user's mistake, or the last line of Ray's report of another error."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, JaxisError):
            return str(cause)
        cause = getattr(cause, "cause", None) or cause.__cause__
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__
