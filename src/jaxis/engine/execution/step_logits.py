"""Logits of the hidden states that a step leaves on the devices, for comparing them and for scoring prompts."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from jaxis.engine.execution.programs import Programs
from jaxis.engine.execution.sampling_batch import scoring_batch
from jaxis.engine.execution.sampling_packer import SamplingPacker
from jaxis.engine.execution.step_part import HeadPart
from jaxis.engine.execution.step_programs import LOGITS_CHUNK_ROWS, LogitsKey
from jaxis.engine.execution.token_logprobs import TokenLogprobs, joined_logprobs
from jaxis.engine.scheduling.scheduler_output import ScheduledSequence, SchedulerOutput
from jaxis.sampling_params import RAW_LOGPROBS


class StepLogits:
    """Computes logits of the newest hidden states, whose rows after the step's tokens are padding.

    Attributes:
      num_replaced: Number of times that the runner has replaced the hidden states.
    """

    def __init__(self, programs: Programs, vocab_size: int) -> None:
        self._programs, self._vocab_size = programs, vocab_size
        self.num_replaced = 0

    def of_rows(
        self,
        num_padded: int,
        rows: np.ndarray,
        head: HeadPart | None = None,
        of_head: np.ndarray | None = None,
    ) -> np.ndarray:
        """Returns logits, float32 [len(rows), V]; the arguments are those of `in_chunks`."""
        return np.concatenate(list(self.in_chunks(num_padded, rows, head, of_head)))

    def in_chunks(
        self,
        num_padded: int,
        rows: np.ndarray,
        head: HeadPart | None = None,
        of_head: np.ndarray | None = None,
    ) -> Iterator[np.ndarray]:
        """Yields logits of these rows of the hidden states in parts of up to LOGITS_CHUNK_ROWS rows.

        `num_padded` is the number of all rows. `head` is that of `LogitsKey`; `of_head` is its
        operand for the rows.

        Raises:
          RuntimeError: The hidden states were replaced before the last part was taken.
        """
        key, num_replaced = LogitsKey(num_padded, targets=False, head=head), self.num_replaced
        for start in range(0, len(rows), LOGITS_CHUNK_ROWS):
            if self.num_replaced != num_replaced:
                raise RuntimeError("another step ran before the last of the logits were taken")
            of_rows = [] if of_head is None else [_chunk(of_head[start:])]
            logits = self._programs.run(key, _chunk(rows[start:].astype(np.int32)), *of_rows)
            yield np.asarray(logits)[: len(rows) - start]

    def prompt_logprobs(
        self, num_padded: int, entry: ScheduledSequence, first_row: int, head: HeadPart | None
    ) -> TokenLogprobs[np.ndarray]:
        """Returns log-probabilities of the prompt token after each of the entry's prompt tokens.

        The entry's step left the `num_padded` hidden states, of which `first_row` is the entry's first. `head` is the
        change of the head for the entry, if any.
        """
        targets = entry.sequence.prompt_token_ids[entry.start + 1 : entry.start + entry.num_tokens + 1]
        features, parameters = None, []
        if entry.sequence.sampling_params.logprobs_mode not in (None, RAW_LOGPROBS):
            batch = scoring_batch(entry.sequence.sampling_params, LOGITS_CHUNK_ROWS, self._vocab_size)
            features = batch.features
            parameters = [SamplingPacker(self._vocab_size).pack([batch], LOGITS_CHUNK_ROWS, features)]
        of_head = [] if head is None else [head.rows([(entry, LOGITS_CHUNK_ROWS)], LOGITS_CHUNK_ROWS)]
        key = LogitsKey(num_padded, targets=True, features=features, head=head)
        chunks: list[TokenLogprobs[np.ndarray]] = []
        for start in range(0, len(targets), LOGITS_CHUNK_ROWS):
            rows = _chunk(np.arange(first_row + start, first_row + len(targets), dtype=np.int32))
            scored = self._programs.run(key, rows, _chunk(np.asarray(targets[start:], np.int32)), *parameters, *of_head)
            chunks.append(scored.each(np.asarray))
        return joined_logprobs(chunks, len(targets))


def first_rows(output: SchedulerOutput, num_padded: int) -> Iterator[tuple[ScheduledSequence, int]]:
    """Yields each entry with its first row in the hidden states of all data ranks, `num_padded` rows a rank."""
    for index, rank in enumerate(output.ranks):
        row = index * num_padded
        for entry in rank.scheduled:
            yield entry, row
            row += entry.num_tokens


def token_rows(output: SchedulerOutput, num_padded: int) -> np.ndarray:
    parts = [np.arange(first, first + entry.num_tokens) for entry, first in first_rows(output, num_padded)]
    return np.concatenate(parts)


def _chunk(values: np.ndarray) -> np.ndarray:
    chunk = np.zeros(LOGITS_CHUNK_ROWS, values.dtype)
    chunk[: min(len(values), LOGITS_CHUNK_ROWS)] = values[:LOGITS_CHUNK_ROWS]
    return chunk
