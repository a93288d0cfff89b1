"""A sequence as the scheduler sees it: token ids, counters and the blocks it holds. No arrays, no text."""

from __future__ import annotations

import enum
from array import array
from dataclasses import KW_ONLY, dataclass, field
from typing import NamedTuple, Protocol

from jaxis.sampling_params import SamplingParams


class SequenceId(NamedTuple):
    """A sequence's name in the engine: its request's id, and its index among the request's `n` sequences.

    It is no string, so that no request's own id can be mistaken for one.
    """

    request_id: str
    index: int = 0


class SequenceStatus(enum.Enum):
    """The status of a sequence; the three FINISHED states are final.

    Attributes:
      finish_reason: One of "stop", "length" and "abort"; None while unfinished.
      finished: True if there is a finish reason.
    """

    WAITING = enum.auto(), None
    RUNNING = enum.auto(), None
    PREEMPTED = enum.auto(), None
    FINISHED_STOPPED = enum.auto(), "stop"
    FINISHED_LENGTH = enum.auto(), "length"
    FINISHED_ABORTED = enum.auto(), "abort"

    def __init__(self, _: object, finish_reason: str | None) -> None:
        self.finish_reason = finish_reason
        self.finished = finish_reason is not None


@dataclass(slots=True)
class BlockTable:
    """A sequence's blocks in one pool.

    Attributes:
      block_ids: Entry i is the block of tokens (first + i) * B to (first + i + 1) * B - 1.
      first: Index of the first block still held; no token still to be computed sees those before it.
    """

    block_ids: array[int] = field(default_factory=lambda: array("i"))  # copied into a step's vector in one piece
    first: int = 0

    @property
    def stop(self) -> int:
        """The number of blocks from the sequence's start to the table's end."""
        return self.first + len(self.block_ids)


NO_SLOT = -1


class DraftedStates(NamedTuple):
    """The slots and positions of a sequence's states around a step with drafts.

    Attributes:
      start: Position of the step's first token; the step reads the states before it.
      stop: Position after the step's last draft.
      keep: Slot with the states after the last known token; NO_SLOT if there is none, or if it is kept for other
        sequences too.
      keep_stop: Position after that token.
    """

    start: int
    stop: int
    keep: int
    keep_stop: int


@dataclass(slots=True)
class SequenceState:
    """The slots of a running sequence's recurrent states (see `StateManager`).

    Attributes:
      read: Slot with the states after `num_computed_tokens` tokens; NO_SLOT if none are computed.
      write: The sequence's own slot.
      cut: Position where a step should end so that its state is kept, since other prompts have the same tokens up to
        there; 0 for none.
      unregistered: Kept states that cannot be found yet: (blocks before it, slot), oldest first.
      newest_kept: Blocks before the newest kept state that can be found; 0 for none.
      drafted: Step in flight that computes drafts, until the right ones are known; otherwise None. Meanwhile `read` has
        the states before that step, and `write` those after it.
    """

    read: int
    write: int
    cut: int = 0
    unregistered: list[tuple[int, int]] = field(default_factory=list)
    newest_kept: int = 0
    drafted: DraftedStates | None = None


class PromptSpan(Protocol):
    """A span of a prompt whose keys and values depend on more than its tokens.

    Attributes:
      digest: Digest of what they depend on.
      start: Position of the first token.
      stop: Position after the last token.
      is_bidirectional: True if the tokens see each other, so that one step computes all of them.
    """

    @property
    def digest(self) -> bytes: ...
    @property
    def start(self) -> int: ...
    @property
    def stop(self) -> int: ...
    @property
    def is_bidirectional(self) -> bool: ...

    def overlaps(self, start: int, stop: int) -> bool:
        """Returns whether it has tokens at positions from `start` to before `stop`."""
        ...


@dataclass(slots=True, eq=False)
class Sequence:
    """One sequence to generate. Two sequences are never equal, whatever they hold.

    Attributes:
      seq_id: Id, unique among unfinished sequences.
      prompt_token_ids: The prompt, at least one token.
      sampling_params: Sampling parameters, read here for the stopping rules and for `prompt_logprobs`.
      eos_token_ids: Tokens that end the sequence unless `ignore_eos`.
      max_total_tokens: Most tokens, prompt and output together.
      arrival: Number that rises with every request; orders sequences of equal priority.
      priority: Priority; the lower value is served first.
      client: Client that sent the request; clients share the tokens of steps equally. None is a client like any other.
      cache_salt: Salt of the prefix cache; only sequences with the same salt share blocks.
      identity: Digest of what all its keys and values depend on besides the model and tokens; b"" for nothing.
      place: Key of the place that it needs to run (see `Places`); b"" for none.
      spans: Spans of its prompt whose keys and values depend on more than tokens, in order.
      prediction_token_ids: Expected content of the output; only drafting looks for its guesses there.
      output_token_ids: Sampled tokens whose value the host knows.
      num_computed_tokens: Tokens whose keys and values dispatched steps have written or will write.
      num_inflight_tokens: Tokens sampled by dispatched steps whose value the host does not know yet; one for a step
        that computes drafts, however many of them turn out right.
      num_inflight_drafts: Draft tokens that a dispatched step computes; no other step is scheduled until the right ones
        are known.
      block_tables: One for each group of layers (see `BlockManager`); empty while the sequence holds no blocks.
      state: Slots of its recurrent states; None while it holds no slot, or if the model has no such states.
      block_digests: Chained digests of the leading full blocks, as far as computed (see `BlockManager`).
      num_registered_blocks: Leading blocks already offered to, or taken from, the prefix cache.
      num_cached_tokens: Prompt tokens that the prefix cache held when the sequence was first admitted.
      num_accepted_predictions: Tokens of its output that were guessed right from the prediction.
      num_rejected_predictions: Tokens that were guessed wrong from the prediction.
      num_drafts: Drafts of its tokens that steps have computed.
      num_accepted_drafts: Drafts among them that were right.
      num_preemptions: Number of times it lost its blocks and had to recompute.
      first_scheduled_time: Time when its first step was scheduled, as `time.monotonic` seconds; None before.
      status: Its status.
      stop_reason: The stop token id or stop string that ended it; None for end-of-sequence.
    """

    seq_id: SequenceId
    prompt_token_ids: list[int]
    sampling_params: SamplingParams
    eos_token_ids: frozenset[int]
    max_total_tokens: int
    _: KW_ONLY
    arrival: int
    priority: int = 0
    client: str | None = None
    cache_salt: str | None = None
    identity: bytes = b""
    place: bytes = b""
    spans: tuple[PromptSpan, ...] = ()
    prediction_token_ids: list[int] = field(default_factory=list)
    output_token_ids: list[int] = field(default_factory=list)
    num_computed_tokens: int = 0
    num_inflight_tokens: int = 0
    num_inflight_drafts: int = 0
    block_tables: list[BlockTable] = field(default_factory=list)
    state: SequenceState | None = None
    block_digests: list[bytes] = field(default_factory=list)
    num_registered_blocks: int = 0
    num_cached_tokens: int = 0
    num_accepted_predictions: int = 0
    num_rejected_predictions: int = 0
    num_drafts: int = 0
    num_accepted_drafts: int = 0
    num_preemptions: int = 0
    first_scheduled_time: float | None = None
    status: SequenceStatus = SequenceStatus.WAITING
    stop_reason: int | str | None = None

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def num_tokens(self) -> int:
        """The number of prompt and output tokens whose values are known."""
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    @property
    def num_tokens_with_inflight(self) -> int:
        """The number of known tokens and of those being sampled."""
        return len(self.prompt_token_ids) + len(self.output_token_ids) + self.num_inflight_tokens

    @property
    def is_known(self) -> bool:
        """True if the sequence runs, the host knows all its tokens, and the next step computes the last one."""
        return (
            self.status is SequenceStatus.RUNNING
            and self.num_inflight_tokens == 0
            and self.num_computed_tokens + 1 == self.num_tokens
        )

    @property
    def service_order(self) -> tuple[int, int]:
        """The sort key for sequences of one client; the smallest is admitted first and preempted last."""
        return self.priority, self.arrival

    def token_id(self, position: int) -> int:
        """Returns the known token at `position`; raises IndexError if it is in flight."""
        num_prompt_tokens = len(self.prompt_token_ids)
        if position < num_prompt_tokens:
            return self.prompt_token_ids[position]
        return self.output_token_ids[position - num_prompt_tokens]

    def token_ids(self, start: int, stop: int) -> list[int]:
        """Returns the known tokens from `start` up to, not including, `stop`."""
        num_prompt_tokens = len(self.prompt_token_ids)
        if stop <= num_prompt_tokens:
            return self.prompt_token_ids[start:stop]
        output = self.output_token_ids[max(start - num_prompt_tokens, 0) : stop - num_prompt_tokens]
        return self.prompt_token_ids[start:] + output

    def ending(self) -> tuple[SequenceStatus, int | None] | None:
        """Returns the status and stop reason with which the newest output token ends the sequence, if it does."""
        params = self.sampling_params
        token_id = self.output_token_ids[-1]
        if len(self.output_token_ids) > params.min_tokens:
            if token_id in self.eos_token_ids and not params.ignore_eos:
                return SequenceStatus.FINISHED_STOPPED, None
            if token_id in params.stop_token_ids:
                return SequenceStatus.FINISHED_STOPPED, token_id
        if self.num_tokens >= self.max_total_tokens:
            return SequenceStatus.FINISHED_LENGTH, None
        return None
