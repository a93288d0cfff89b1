"""The requests that an engine has not answered yet."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Many

from jaxis.engine.execution.feature import RequestFeature
from jaxis.engine.execution.sequence_sampling import SequenceSampling
from jaxis.engine.output_processor import CompletionState, Request
from jaxis.engine.scheduling.sequence import Sequence, SequenceId


class UnfinishedRequests:
    """Unfinished requests by id, and their unfinished completions by the sequences that the scheduler knows.

    Attributes:
      sampling: Sampling parameters of each unfinished sequence.

    Args:
      features: Features, which are told of completions that are added and that end.
    """

    def __init__(self, features: Many[RequestFeature] = ()) -> None:
        self._features = features
        for feature in features:
            feature.begin()
        self._requests: dict[str, Request] = {}
        self._completions: dict[SequenceId, CompletionState] = {}
        self.sampling: dict[SequenceId, SequenceSampling] = {}

    def __len__(self) -> int:
        return len(self._requests)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._requests

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests.values())

    def add(self, request: Request) -> None:
        """Adds a request with all its completions."""
        for completion in request.completions:
            self._completions[completion.sequence.seq_id] = completion
            self.sampling[completion.sequence.seq_id] = completion.sampling
            for feature in self._features:
                feature.added(completion)
        self._requests[request.request_id] = request

    def pop(self, request_id: str) -> Request | None:
        """Removes a request, but not its completions; None if there is no such request."""
        return self._requests.pop(request_id, None)

    def completion(self, sequence: Sequence) -> CompletionState:
        """Returns the completion of an unfinished sequence."""
        return self._completions[sequence.seq_id]

    def has(self, sequence: Sequence) -> bool:
        """Returns whether this sequence is unfinished; another sequence may have its id by now."""
        completion = self._completions.get(sequence.seq_id)
        return completion is not None and completion.sequence is sequence

    def end(self, completion: CompletionState) -> None:
        """Removes a completion that gets no more tokens."""
        ended = self._completions.pop(completion.sequence.seq_id, None)
        for feature in self._features if ended is not None else ():
            feature.ended(completion)
        self.sampling.pop(completion.sequence.seq_id, None)

    def needs_newest_token(self, sequence: Sequence) -> bool:
        """Returns whether sampling a sequence's next token depends on its newest one."""
        sampling = self.sampling.get(sequence.seq_id)
        return sampling is not None and sampling.needs_newest_token
