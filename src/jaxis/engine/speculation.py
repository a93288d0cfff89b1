"""The interface between an engine and speculative decoding, whose room may not be installed. Imports no JAX."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as AbstractSequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from jaxis.rooms import has_room, room_module

if TYPE_CHECKING:
    from jaxis.config.speculative import SpeculativeConfig
    from jaxis.engine.execution.runner import Runner
    from jaxis.engine.execution.sequence_sampling import SequenceSampling
    from jaxis.engine.scheduling.scheduler_output import SchedulerOutput
    from jaxis.engine.scheduling.sequence import Sequence, SequenceId
    from jaxis.tokenizer import Tokenizer

_ROOM = "engine.drafting"


@dataclass
class DraftCounts:
    """Results of drafts since the start.

    Attributes:
      num_drafts: Steps of a sequence that computed drafts.
      num_draft_tokens: Draft tokens computed.
      num_accepted_tokens: Draft tokens that were right.
      num_accepted_by_position: Entry i counts the drafts whose first i + 1 tokens, at least, were right.
    """

    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_accepted_by_position: list[int] = field(default_factory=list)

    def copy(self) -> DraftCounts:
        return DraftCounts(
            self.num_drafts,
            self.num_draft_tokens,
            self.num_accepted_tokens,
            self.num_accepted_by_position.copy(),
        )

    def since(self, earlier: DraftCounts) -> DraftCounts:
        """Returns the counts of drafts after `earlier`, a copy of these counts, was made."""
        before = earlier.num_accepted_by_position
        return DraftCounts(
            self.num_drafts - earlier.num_drafts,
            self.num_draft_tokens - earlier.num_draft_tokens,
            self.num_accepted_tokens - earlier.num_accepted_tokens,
            [number - (before[i] if i < len(before) else 0) for i, number in enumerate(self.num_accepted_by_position)],
        )

    def add(self, num_drafts: int, num_right: int) -> None:
        self.num_drafts += 1
        self.num_draft_tokens += num_drafts
        self.num_accepted_tokens += num_right
        self.num_accepted_by_position += [0] * (num_drafts - len(self.num_accepted_by_position))
        for position in range(num_right):
            self.num_accepted_by_position[position] += 1


class NoSpeculation:
    """The interface between engine and drafts; this base class makes none.

    Attributes:
      counts: Counters of drafts; None if none are made.
    """

    counts: DraftCounts | None = None

    def wants_newest_tokens(self, output: SchedulerOutput, num_running: int) -> bool:
        """Returns whether the step after `output` should have drafts, for which the tokens of `output` must be read."""
        del output, num_running
        return False

    def begin(self, sequences: AbstractSequence[Sequence], num_running: int) -> None:
        """Reads the prediction of a request that is about to be queued while so many sequences run, if it has one.

        Raises:
          RequestError: The prediction cannot be tokenized.
        """

    def propose(
        self, sampling: Mapping[SequenceId, SequenceSampling], num_running: int
    ) -> Mapping[SequenceId, AbstractSequence[int]]:
        """Returns drafts for the next step, by sequence, from the sampling state of each unfinished one.

        Call it before each step is scheduled.
        """
        del sampling, num_running
        return {}

    def observe(self, output: SchedulerOutput, new_token_ids: AbstractSequence[AbstractSequence[int]]) -> None:
        """Records the new tokens of each entry of a step, as passed to the scheduler's `update`."""

    def observe_time(self, output: SchedulerOutput, seconds: float) -> None:
        """Records the time of the step that was observed last."""

    def forget(self, sequence: Sequence) -> None:
        """Drops the data of a sequence, which has ended."""

    def reset(self) -> None:
        """Drops the data of all sequences."""


def make_speculation(
    config: SpeculativeConfig | None,
    runner: Runner,
    extend_blocks: Callable[[Sequence, int, int], bool],
    tokenizer: Tokenizer | None,
) -> NoSpeculation:
    """Returns what makes drafts as configured.

    Args:
      config: The user's configuration; None: n-gram lookup where it is on by default.
      runner: Runner of the steps with drafts.
      extend_blocks: The scheduler's `BlockManager.extend`.
      tokenizer: Tokenizer of predictions that are texts, if there is one.

    Raises:
      ConfigError: The configuration asks for drafts, and their room is not installed.
    """
    if not has_room(_ROOM) and (config is None or config.num_speculative_tokens == 0):
        return NoSpeculation()
    return room_module(_ROOM, "make", "speculative_config").make_speculation(config, runner, extend_blocks, tokenizer)
