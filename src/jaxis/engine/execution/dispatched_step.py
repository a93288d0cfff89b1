"""A step on its way through the devices: first its model is dispatched, then its sampler, then its tokens are read."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as AbstractSequence
from dataclasses import dataclass

import jax
import numpy as np

from jaxis.engine.execution.feature import RequestFeature
from jaxis.engine.execution.sampler import INVALID_TOKEN_ID, SamplerOutput
from jaxis.engine.execution.sequence_sampling import SequenceSampling
from jaxis.engine.execution.token_logprobs import TokenLogprobs
from jaxis.engine.scheduling.scheduler_output import ScheduledSequence, SchedulerOutput
from jaxis.engine.scheduling.sequence import Sequence, SequenceId

SamplingStates = Mapping[SequenceId, SequenceSampling]


@dataclass(frozen=True)
class Observation:
    """Values that a feature's observer saw in a step.

    Attributes:
      feature: The feature.
      values: [T, ...], T padded, of all data ranks.
      first_rows: Each observed entry, with its first row.
    """

    feature: RequestFeature
    values: jax.Array
    first_rows: AbstractSequence[tuple[ScheduledSequence, int]]

    def of_entries(self) -> Iterator[tuple[ScheduledSequence, np.ndarray]]:
        """Yields each entry with the values of its tokens; waits for the device."""
        values = np.asarray(self.values)
        for entry, first in self.first_rows:
            yield entry, values[first : first + entry.num_tokens]


@dataclass(frozen=True)
class DispatchedStep:
    """A step that was dispatched to the devices.

    Attributes:
      output: The scheduled step.
      sampled: Device arrays with `num_rows` rows for each entry, in order, each data rank's padded to as many; None if
        no sequence samples in the step.
      prompt_logprobs: For entries that asked for them: the entry's index and the log-probabilities of its chunk's next
        tokens.
      observed: Values that observers saw.
    """

    output: SchedulerOutput
    sampled: SamplerOutput | None
    prompt_logprobs: AbstractSequence[tuple[int, TokenLogprobs[np.ndarray]]]
    observed: AbstractSequence[Observation] = ()

    def token_ids(self) -> list[list[int]]:
        """Returns each entry's sampled tokens, [num_rows]; meaningless if it does not sample. Waits for the device."""
        scheduled = self.output.scheduled
        if self.sampled is None:
            return [[0] * entry.num_rows for entry in scheduled]
        token_ids = self._of_entries(self.sampled.token_ids).tolist()
        if not self.output.has_drafts:
            return [[token_id] for token_id in token_ids]
        rows = iter(token_ids)
        return [list(itertools.islice(rows, entry.num_rows)) for entry in scheduled]

    def new_token_ids(self) -> tuple[list[AbstractSequence[int]], list[Sequence]]:
        """Returns the tokens that extend each entry's sequence, and the sequences for which none could be sampled."""
        found: list[AbstractSequence[int]] = []
        failed = []
        for entry, sampled in zip(self.output.scheduled, self.token_ids(), strict=True):
            token_ids = entry.accepted(sampled)
            if INVALID_TOKEN_ID in token_ids:
                token_ids = token_ids[: token_ids.index(INVALID_TOKEN_ID)]
                failed += [entry.sequence] if entry.samples else []
            found.append(token_ids)
        return found, failed

    def first_rows(self) -> dict[SequenceId, int]:
        """Returns each sequence's first row in `logprobs`."""
        scheduled = self.output.scheduled
        rows = itertools.accumulate((entry.num_rows for entry in scheduled), initial=0)
        return {entry.sequence.seq_id: row for entry, row in zip(scheduled, rows, strict=False)}

    def logprobs(self) -> TokenLogprobs[np.ndarray] | None:
        """Returns the sampled tokens' log-probabilities as numpy arrays, in order, if any sequence asked for them."""
        if self.sampled is None or self.sampled.logprobs is None:
            return None
        return self.sampled.logprobs.each(self._of_entries)

    def _of_entries(self, sampled: jax.Array) -> np.ndarray:
        """Returns the rows of entries, without those that pad data ranks."""
        # Waits for all devices, though one has the tokens: the host buffers that they read will be overwritten.
        rows, ranks = np.asarray(jax.block_until_ready(sampled)), self.output.ranks
        if len(ranks) == 1:
            return rows[: self.output.num_rows]
        of_ranks = rows.reshape(len(ranks), -1, *rows.shape[1:])
        return np.concatenate([part[: rank.num_rows] for part, rank in zip(of_ranks, ranks, strict=True)])


@dataclass(frozen=True)
class ForwardedStep:
    """A step whose model was dispatched, but not yet its sampler; `run_sampler` dispatches it.

    The other fields are those of `DispatchedStep`.
    """

    output: SchedulerOutput
    prompt_logprobs: AbstractSequence[tuple[int, TokenLogprobs[np.ndarray]]]
    run_sampler: Callable[[SamplingStates], SamplerOutput]
    observed: AbstractSequence[Observation] = ()

    def sample(self, sampling: SamplingStates) -> DispatchedStep:
        """Sends the step's sampler to the devices; the next step can be forwarded after that.

        `sampling` has each scheduled sequence's sampling state; a sequence that has ended since may be missing.
        """
        sampled = None
        if any(entry.samples for entry in self.output.scheduled):
            sampled = self.run_sampler(sampling)
        return DispatchedStep(self.output, sampled, self.prompt_logprobs, self.observed)
