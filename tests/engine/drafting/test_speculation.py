"""Which sequences get drafts, and when: those whose guesses come true, if enough of them do beside the others."""

from __future__ import annotations

from types import SimpleNamespace

from jaxis.engine.drafting.draft_length import DraftLengths
from jaxis.engine.drafting.speculation import MAX_UNGUESSED_TOKENS, Speculation
from jaxis.engine.scheduling.scheduler_output import ScheduledSequence, SchedulerOutput
from jaxis.engine.scheduling.sequence import Sequence, SequenceId, SequenceStatus
from jaxis.sampling_params import SamplingParams

ANY_DRAFT = SimpleNamespace(allowed_drafts=lambda token_ids: list(token_ids))


class KnownText:
    """Guesses that sequence "i" goes on with i, i, i, ...; for those of `silent`, has no guess."""

    needs_match = True

    def __init__(self) -> None:
        self.silent: set[int] = set()

    def propose(self, requests):
        numbers = [int(request.sequence.seq_id.request_id) for request in requests]
        limits = [request.limit for request in requests]
        return [[] if n in self.silent else [n] * limit for n, limit in zip(numbers, limits, strict=True)]

    def observe(self, sequence, num_drafts, num_right):
        pass

    def forget(self, sequence):
        pass


class Batch:
    """Sequences that decode together, in steps of 16 rows, 32, 48, ..., that take 1 + (rows - 1) / 20."""

    def __init__(self, size: int, *, is_compiled: bool = True) -> None:
        lengths = DraftLengths(lambda num_tokens: -(-num_tokens // 16) * 16, lambda num_tokens: is_compiled, 512)
        self.drafter = KnownText()
        self.speculation = Speculation(self.drafter, lengths, max_drafts=7)
        self.sequences = [
            Sequence(SequenceId(str(i)), [0], SamplingParams(), frozenset(), 1000, arrival=0) for i in range(size)
        ]
        for sequence in self.sequences:
            sequence.status = SequenceStatus.RUNNING

    def step(self, *tokens: list[int]) -> None:
        """A step that computed drafts, or none, and gave these tokens; to one sequence after the other."""
        entries = []
        for sequence, token_ids in zip(self.sequences, tokens, strict=True):
            drafts = (int(sequence.seq_id.request_id),) * (len(token_ids) - 1)
            start = sequence.num_tokens - 1
            entries.append(ScheduledSequence(sequence, start, len(token_ids), True, None, drafts))
            sequence.output_token_ids += token_ids
            sequence.num_computed_tokens = sequence.num_tokens - 1
        self.speculation.observe(SchedulerOutput(tuple(entries), len(entries), (), None), tokens)

    @property
    def wanted(self) -> bool:
        return self.speculation.wants_newest_tokens(len(self.sequences))

    @property
    def drafts(self) -> dict[str, int]:
        """The number of drafts of each sequence that gets some."""
        sampling = {sequence.seq_id: ANY_DRAFT for sequence in self.sequences}
        proposed = self.speculation.propose(sampling, len(self.sequences))
        return {seq_id.request_id: len(token_ids) for seq_id, token_ids in proposed.items()}


def test_a_guess_must_have_come_true_first() -> None:
    batch = Batch(1)
    batch.step([9])
    assert not batch.wanted
    assert batch.drafts == {}
    batch.step([0])
    assert batch.wanted
    assert batch.drafts == {"0": 7}
    batch.step([9])
    assert not batch.wanted, "the guess was wrong"


def test_few_of_many_sequences_wait_until_enough_have_guesses() -> None:
    batch = Batch(16)
    batch.step(*[[99]] * 16)
    batch.step([0], *[[99]] * 15)
    assert not batch.wanted, "15 others would wait for one"
    batch.step(*[[i] for i in range(16)])
    assert batch.wanted, "and nobody was left alone meanwhile"
    drafts = batch.drafts
    assert sum(drafts.values()) == 16, "as many rows as a step is padded to"
    assert drafts["0"] == max(drafts.values()) > 1, "more for the one whose guesses came true more often"
    assert len(drafts) > 8


def test_what_is_not_compiled_delays_no_step() -> None:
    batch = Batch(1, is_compiled=False)
    batch.step([9])
    batch.step([0])
    assert not batch.wanted
    assert batch.drafts == {}


def test_after_a_short_silence_a_guess_is_trusted_at_once_and_after_a_long_one_not() -> None:
    for num_silent in (1, MAX_UNGUESSED_TOKENS, MAX_UNGUESSED_TOKENS + 1):
        batch = Batch(1)
        batch.step([9])
        batch.step([0])
        batch.drafter.silent = {0}
        for _ in range(num_silent):
            batch.step([0])
            assert not batch.wanted
        batch.drafter.silent = set()
        batch.step([0])
        assert batch.wanted == (num_silent <= MAX_UNGUESSED_TOKENS)


def test_sequences_that_want_none_get_none() -> None:
    batch = Batch(1)
    batch.sequences[0].sampling_params = SamplingParams(num_speculative_tokens=0)
    for _ in range(3):
        batch.step([0])
        assert not batch.wanted
        assert batch.drafts == {}
