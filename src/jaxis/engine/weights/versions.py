"""The version of the weights that sampled each token, as a feature of requests."""

from __future__ import annotations

from jaxis.engine.execution.feature import Completion, RequestFeature
from jaxis.engine.scheduling.sequence import Sequence, SequenceId
from jaxis.outputs import FIRST_VERSION, CompletionOutput


class TokenVersions:
    """The versions of the weights that a completion's tokens were sampled by."""

    def __init__(self) -> None:
        self._begun: list[tuple[int, str | int]] = []

    def begin(self, version: str | int, num_tokens: int) -> None:
        """Marks tokens after the first `num_tokens` as sampled by weights of this version."""
        self._begun.append((num_tokens, version))

    def report(self, output: CompletionOutput, sequence: Sequence, start: int) -> None:
        """Writes the versions of the output tokens from `start` on."""
        versions: list[str | int] = [FIRST_VERSION] * len(sequence.output_token_ids)
        for first, version in self._begun:
            versions[first:] = [version] * (len(versions) - first)
        output.weight_versions = versions[start:]


class WeightVersions(RequestFeature):
    """The version of an engine's weights, which completions report once it is not the first.

    Attributes:
      current: Version of the weights; FIRST_VERSION until they are updated.
    """

    def __init__(self) -> None:
        self.current: str | int = FIRST_VERSION
        self._unfinished: dict[SequenceId, Completion] = {}

    def begin(self) -> None:
        self._unfinished.clear()

    def added(self, completion: Completion) -> None:
        self._unfinished[completion.sequence.seq_id] = completion
        if self.current != FIRST_VERSION:
            self._mark(completion)

    def ended(self, completion: Completion) -> None:
        self._unfinished.pop(completion.sequence.seq_id, None)

    def change(self, version: str | int) -> None:
        """Marks the tokens that are sampled from now on."""
        self.current = version
        for completion in self._unfinished.values():
            self._mark(completion)

    def _mark(self, completion: Completion) -> None:
        record = completion.records.setdefault("versions", TokenVersions())
        assert isinstance(record, TokenVersions)
        record.begin(self.current, len(completion.sequence.output_token_ids))
