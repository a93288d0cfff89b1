"""The requests that an engine has not answered yet, and what the results of steps do to them."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from jaxis.engine.execution.dispatched_step import DispatchedStep
from jaxis.engine.execution.request_features import RequestFeatures
from jaxis.engine.execution.sequence_sampling import SequenceSampling
from jaxis.engine.execution.token_logprobs import TokenLogprobs
from jaxis.engine.kv_connector import KVConnector
from jaxis.engine.output_processor import CompletionState, Request
from jaxis.engine.scheduling.data_ranks import DataRanksScheduler, add_all
from jaxis.engine.scheduling.scheduler import Scheduler
from jaxis.engine.scheduling.sequence import Sequence, SequenceId, SequenceStatus
from jaxis.engine.speculation import NoSpeculation
from jaxis.errors import EngineError

NOT_FINITE = (
    "the model's logits are not finite: its weights are damaged, or its activations exceed the dtype's range "
    "(float16 has the smallest; try float32)"
)


class UnfinishedRequests:
    """Unfinished requests by id, and their unfinished completions by the sequences that the scheduler knows.

    Attributes:
      sampling: Sampling parameters of each unfinished sequence.
      speculation: Maker of drafts for them.

    Args:
      scheduler: Scheduler of their sequences.
      features: Features, which are told of completions that are added and that end.
      speculation: Maker of drafts.
      connector: Connector to blocks beyond the devices, which is told of requests.
    """

    def __init__(
        self,
        scheduler: Scheduler | DataRanksScheduler,
        features: RequestFeatures,
        speculation: NoSpeculation,
        connector: KVConnector,
    ) -> None:
        self._scheduler, self._features = scheduler, features
        self.speculation, self._connector = speculation, connector
        self._requests: dict[str, Request] = {}
        self._completions: dict[SequenceId, CompletionState] = {}
        self.sampling: dict[SequenceId, SequenceSampling] = {}
        for feature in features:
            feature.begin()

    def __len__(self) -> int:
        return len(self._requests)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._requests

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests.values())

    def add(self, request: Request) -> None:
        """Queues a request with all its completions."""
        sequences = [completion.sequence for completion in request.completions]
        self.speculation.begin(sequences, self._scheduler.num_running)
        add_all(self._scheduler, sequences)
        for completion in request.completions:
            self._completions[completion.sequence.seq_id] = completion
            self.sampling[completion.sequence.seq_id] = completion.sampling
            for feature in self._features:
                feature.added(completion)
        self._requests[request.request_id] = request
        self._connector.request_added(sequences[0])

    def abort(self, request_id: str) -> Request | None:
        """Ends a request; returns it, or None if there is no such unfinished request."""
        request = self._requests.pop(request_id, None)
        if request is None:
            return None
        for completion in request.completions:
            if not completion.sequence.status.finished:
                self._scheduler.abort_sequence(completion.sequence.seq_id)
                completion.finish()
            self.speculation.forget(completion.sequence)
            self._end(completion)
        self._connector.request_done(request.completions[0].sequence, answered=False)
        return request

    def lose_all(self, reason: str) -> None:
        """Sets the `error` of all requests, which the engine forgets."""
        for request in self:
            request.error = EngineError(reason)
            self._connector.request_done(request.completions[0].sequence, answered=False)

    def needs_newest_token(self, sequence: Sequence) -> bool:
        """Returns whether sampling a sequence's next token depends on its newest one."""
        sampling = self.sampling.get(sequence.seq_id)
        return sampling is not None and sampling.needs_newest_token

    def apply(self, step: DispatchedStep) -> list[Request]:
        """Applies what a step computed, for which it waits; returns the affected requests."""
        logprobs = step.logprobs()
        self._note_read_tokens(step)
        new_token_ids, failed = step.new_token_ids()
        first_rows = step.first_rows()
        touched: dict[str, Request] = {}
        for sequence, token_id, index in self._scheduler.update(step.output, new_token_ids):
            request = self._add_token(sequence, token_id, logprobs, first_rows[sequence.seq_id] + index)
            touched[request.request_id] = request
        self.speculation.observe(step.output, new_token_ids)
        for sequence in failed:
            if not sequence.status.finished:
                request = self._fail(self._completions[sequence.seq_id])
                touched[request.request_id] = request
        self._connector.step_read(step.output)
        for request_id, request in touched.items():
            if request.finished:
                self._requests.pop(request_id, None)
                first, answered = request.completions[0].sequence, request.error is None
                request.kv_transfer_params = self._connector.request_done(first, answered=answered)
        return list(touched.values())

    def _note_read_tokens(self, step: DispatchedStep) -> None:
        """Applies a step's results about the tokens that it read: log-probabilities, and what features observe."""
        for index, prompt_logprobs in step.prompt_logprobs:
            entry = step.output.scheduled[index]
            if (completion := self._of(entry.sequence)) is not None:
                completion.add_prompt_logprobs(entry.start, prompt_logprobs)
        for observation in step.observed:
            for entry, seen in observation.of_entries():
                if (completion := self._of(entry.sequence)) is not None:
                    observation.feature.take(completion, entry.start, seen)

    def _of(self, sequence: Sequence) -> CompletionState | None:
        """Returns the completion of a sequence; None if that has ended, when another sequence may have its id."""
        completion = self._completions.get(sequence.seq_id)
        return completion if completion is not None and completion.sequence is sequence else None

    def _add_token(
        self, sequence: Sequence, token_id: int, logprobs: TokenLogprobs[np.ndarray] | None, row: int
    ) -> Request:
        """Applies a token that the scheduler has appended, and ends its completion where text or grammar end."""
        completion = self._completions[sequence.seq_id]
        stop = completion.add_token(token_id, logprobs, row)
        if not sequence.status.finished and (stop is not None or completion.sampling.grammar_is_complete):
            self._scheduler.finish_sequence(sequence.seq_id, SequenceStatus.FINISHED_STOPPED, stop)
        if sequence.status.finished:
            completion.finish(stop)
            self._end(completion)
        return completion.request

    def _fail(self, completion: CompletionState) -> Request:
        """Ends the request of a sequence for which no token could be sampled."""
        request = completion.request
        if (error := completion.sampling.fault()) is None:
            # Its cached keys and values may be the cause of the non-finite logits.
            self._scheduler.block_manager.forget_prefix(completion.sequence)
        self.abort(request.request_id)
        request.error = error or EngineError(NOT_FINITE)
        return request

    def _end(self, completion: CompletionState) -> None:
        """Removes a completion that gets no more tokens."""
        ended = self._completions.pop(completion.sequence.seq_id, None)
        for feature in self._features if ended is not None else ():
            feature.ended(completion)
        self.sampling.pop(completion.sequence.seq_id, None)
