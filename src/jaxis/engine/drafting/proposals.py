"""A step's drafts, whatever makes them: from the lengths that are wanted to the drafts, and what became of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as AbstractSequence
from typing import NamedTuple

from jaxis.engine.drafting.drafter import DraftRequest
from jaxis.engine.execution.sequence_sampling import SequenceSampling
from jaxis.engine.scheduling.scheduler_output import ScheduledSequence
from jaxis.engine.scheduling.sequence import Sequence, SequenceId


class Verified(NamedTuple):
    """What became of a sequence's drafts of one step.

    Attributes:
      num_seen: Drafts that were compared with the model's tokens, up to the first wrong one or the end.
      num_right: Those before the first wrong one.
    """

    num_seen: int
    num_right: int


def max_drafts_of(sequence: Sequence, max_drafts: int) -> int:
    """Most drafts of a sequence in a step: those of the engine, or fewer if its request says so."""
    wanted = sequence.sampling_params.num_speculative_tokens
    return max_drafts if wanted is None else min(wanted, max_drafts)


def propose_drafts(
    propose: Callable[[AbstractSequence[DraftRequest]], AbstractSequence[AbstractSequence[int]]],
    wanted: Iterable[tuple[Sequence, int]],
    sampling: Mapping[SequenceId, SequenceSampling],
) -> dict[SequenceId, AbstractSequence[int]]:
    """Drafts of sequences, as far as they have room for them and their requests allow the tokens.

    Args:
      propose: Of the drafter.
      wanted: Sequences, and how many drafts are wanted of each.
      sampling: Each sequence's sampling state.

    Returns:
      Drafts by sequence, at least one of each.
    """
    requests = []
    for sequence, length in wanted:
        room = sequence.max_total_tokens - sequence.num_tokens - 1
        if length > 0 and room > 0:
            requests.append(DraftRequest(sequence, min(length, room)))
    proposed: dict[SequenceId, AbstractSequence[int]] = {}
    for request, token_ids in zip(requests, propose(requests), strict=True):
        seq_id = request.sequence.seq_id
        if token_ids := sampling[seq_id].allowed_drafts(token_ids[: request.limit]):
            proposed[seq_id] = token_ids
    return proposed


def verified(entry: ScheduledSequence, num_new_tokens: int) -> Verified:
    """What became of the drafts of a step's entry, which gave so many tokens."""
    num_right = max(num_new_tokens - 1, 0)
    # Drafts behind an end were not looked at.
    return Verified(num_right if entry.sequence.status.finished else entry.num_drafts, num_right)
