"""The requests that an engine has not answered yet."""

from __future__ import annotations

from collections.abc import Iterator

from jaxis.engine.execution.input_encoder import InputEncoder
from jaxis.engine.execution.sequence_sampling import SequenceSampling
from jaxis.engine.output_processor import CompletionState, Request
from jaxis.engine.scheduling.sequence import Sequence, SequenceId


class UnfinishedRequests:
    """Unfinished requests by id, and their unfinished completions by the sequences that the scheduler knows.

    Attributes:
      sampling: Sampling parameters of each unfinished sequence.

    Args:
      inputs: Encoder for image and video inputs; None if the model takes only text.
    """

    def __init__(self, inputs: InputEncoder | None = None) -> None:
        self._inputs = inputs
        if inputs is not None:
            inputs.begin()
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
            if self._inputs is not None:
                self._inputs.hold(completion.sequence.inputs)
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
        if ended is not None and self._inputs is not None:
            self._inputs.let_go(ended.sequence.inputs)
        self.sampling.pop(completion.sequence.seq_id, None)

    def needs_newest_token(self, sequence: Sequence) -> bool:
        """Returns whether sampling a sequence's next token depends on its newest one."""
        sampling = self.sampling.get(sequence.seq_id)
        return sampling is not None and sampling.needs_newest_token
