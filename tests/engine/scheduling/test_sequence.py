"""What a sequence answers about its own tokens and end."""

from __future__ import annotations

import pytest

from jaxis.engine.scheduling.sequence import Sequence, SequenceId, SequenceStatus
from jaxis.sampling_params import SamplingParams


def test_tokens_by_position_span_prompt_and_output() -> None:
    sequence = Sequence(
        SequenceId("a"), [1, 2, 3], SamplingParams(), frozenset(), 9, arrival=0, output_token_ids=[4, 5]
    )
    everything = [1, 2, 3, 4, 5]
    assert [sequence.token_id(position) for position in range(5)] == everything
    for start in range(6):
        for stop in range(start, 6):
            assert sequence.token_ids(start, stop) == everything[start:stop]
    with pytest.raises(IndexError):
        sequence.token_id(5)


def test_only_the_finished_states_have_a_reason() -> None:
    reasons = {status.name: status.finish_reason for status in SequenceStatus if status.finished}
    assert reasons == {"FINISHED_STOPPED": "stop", "FINISHED_LENGTH": "length", "FINISHED_ABORTED": "abort"}
    assert SequenceStatus.PREEMPTED.finish_reason is None
