"""A request as the scheduler sees it: token ids, counters and the blocks it holds. No arrays, no text."""

from __future__ import annotations

import enum
from array import array
from dataclasses import KW_ONLY, dataclass, field

from jaxis.sampling_params import SamplingParams


class RequestStatus(enum.Enum):
    """Where a request stands; the three FINISHED states are final.

    Attributes:
      finish_reason: One of "stop", "length" and "abort"; None while unfinished.
      finished: Whether there is one.
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
    """A request's blocks in one pool.

    Attributes:
      block_ids: Entry i is the block of tokens (first + i) * B to (first + i + 1) * B - 1.
      first: Blocks before were given back: no token yet to be computed sees them.
    """

    block_ids: array[int] = field(default_factory=lambda: array("i"))  # copied into a step's vector in one piece
    first: int = 0

    @property
    def stop(self) -> int:
        """Blocks from the sequence's start to the table's end."""
        return self.first + len(self.block_ids)


@dataclass(slots=True, eq=False)
class Request:
    """One sequence to generate. Two requests are never equal, whatever they hold.

    Attributes:
      request_id: The engine's name for it, unique among unfinished requests.
      prompt_token_ids: The prompt, at least one token.
      sampling_params: Read here for the stopping rules and for `prompt_logprobs`.
      eos_token_ids: Tokens that end the sequence unless `ignore_eos`.
      max_total_tokens: Most tokens, prompt and output together.
      arrival: Rises with every request; orders requests of equal priority.
      priority: The lower value is served first.
      cache_salt: Only requests with the same salt share prefix-cache blocks.
      output_token_ids: Sampled tokens whose value the host knows.
      num_computed_tokens: Tokens whose keys and values dispatched steps have written or will write.
      num_inflight_tokens: Tokens sampled by dispatched steps whose value the host does not know yet.
      block_tables: One for each group of layers (see `BlockManager`); empty while the request holds no blocks.
      block_digests: The chained digests of the leading full blocks, as far as computed (see `BlockManager`).
      num_registered_blocks: Leading blocks already offered to, or taken from, the prefix cache.
      num_cached_tokens: Prompt tokens that the prefix cache held when the request was first admitted.
      num_preemptions: Times it lost its blocks and had to recompute.
      first_scheduled_time: When the first step took it in, as `time.monotonic` seconds; None while it waits for that.
      status: Where it stands.
      stop_reason: The stop token id or stop text that ended it; None for end-of-sequence.
    """

    request_id: str
    prompt_token_ids: list[int]
    sampling_params: SamplingParams
    eos_token_ids: frozenset[int]
    max_total_tokens: int
    _: KW_ONLY
    arrival: int
    priority: int = 0
    cache_salt: str | None = None
    output_token_ids: list[int] = field(default_factory=list)
    num_computed_tokens: int = 0
    num_inflight_tokens: int = 0
    block_tables: list[BlockTable] = field(default_factory=list)
    block_digests: list[bytes] = field(default_factory=list)
    num_registered_blocks: int = 0
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    first_scheduled_time: float | None = None
    status: RequestStatus = RequestStatus.WAITING
    stop_reason: int | str | None = None

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def num_tokens(self) -> int:
        """Prompt and output tokens whose values are known."""
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    @property
    def num_tokens_with_inflight(self) -> int:
        """Known tokens and those being sampled."""
        return len(self.prompt_token_ids) + len(self.output_token_ids) + self.num_inflight_tokens

    @property
    def all_token_ids(self) -> list[int]:
        """A new list of the known tokens, prompt then output."""
        return self.prompt_token_ids + self.output_token_ids

    @property
    def service_order(self) -> tuple[int, int]:
        """Sorts requests: the smallest is admitted first and preempted last."""
        return self.priority, self.arrival

    def token_id(self, position: int) -> int:
        """The known token at `position`; raises IndexError where it is in flight."""
        num_prompt_tokens = len(self.prompt_token_ids)
        if position < num_prompt_tokens:
            return self.prompt_token_ids[position]
        return self.output_token_ids[position - num_prompt_tokens]

    def token_ids(self, start: int, stop: int) -> list[int]:
        """The known tokens from `start` up to, not including, `stop`."""
        num_prompt_tokens = len(self.prompt_token_ids)
        if stop <= num_prompt_tokens:
            return self.prompt_token_ids[start:stop]
        output = self.output_token_ids[max(start - num_prompt_tokens, 0) : stop - num_prompt_tokens]
        return self.prompt_token_ids[start:] + output

    def ending(self) -> tuple[RequestStatus, int | None] | None:
        """The status and stop reason with which the newest output token ends the request; None if it goes on."""
        params = self.sampling_params
        token_id = self.output_token_ids[-1]
        if len(self.output_token_ids) > params.min_tokens:
            if token_id in self.eos_token_ids and not params.ignore_eos:
                return RequestStatus.FINISHED_STOPPED, None
            if token_id in params.stop_token_ids:
                return RequestStatus.FINISHED_STOPPED, token_id
        if self.num_tokens >= self.max_total_tokens:
            return RequestStatus.FINISHED_LENGTH, None
        return None
