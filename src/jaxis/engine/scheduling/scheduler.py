"""Which tokens of which requests run in the next step: continuous batching with chunked prefill.

The engine's loop is `schedule()`, run the step, `update()`. It may run ahead: call `schedule()` for the next step while
the one before still computes, so that the device never waits for the host. This needs what holds of every device
queue, that steps run in the order they were dispatched, and the following of the engine:

- every output of `schedule()` is dispatched at once, before any other call, and gets its `update()`, in order;
- a decode whose input token the host does not know yet takes it from the device, where the step before left it;
- `schedule()` may return None because all depends on tokens in flight; after the `update()` there is work again.

Blocks given back while a dispatched step still reads or writes them may go to another request, even in the very next
step: the device runs it after those. Within a step, no request gives back what its own tokens in that step see.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import NamedTuple

from jaxis.engine.scheduling.block_manager import BlockManager
from jaxis.engine.scheduling.sequence import Request, RequestStatus
from jaxis.engine.scheduling.waiting_queue import WaitingQueue
from jaxis.errors import ConfigError, RequestError


class ScheduledRequest(NamedTuple):
    """One request's part of a step.

    Attributes:
      request: The request; its block tables cover what its tokens in the step see, up to start + num_tokens - 1.
      start: Position of the first token to compute.
      num_tokens: Tokens to compute, at least 1.
      samples: Whether the step computes the request's last token, and so samples the next one.
    """

    request: Request
    start: int
    num_tokens: int
    samples: bool


@dataclass(frozen=True, slots=True)
class SchedulerOutput:
    """One step.

    Attributes:
      scheduled: The requests in the step, decodes first, then prefill chunks.
      num_decodes: Leading entries that compute just the token sampled last (which may be in flight).
      preempted: Ids of the requests that lost their blocks since the output before.
    """

    scheduled: tuple[ScheduledRequest, ...]
    num_decodes: int
    preempted: tuple[str, ...]

    @property
    def num_tokens(self) -> int:
        """Tokens that the step computes (T)."""
        return sum(entry.num_tokens for entry in self.scheduled)


class Scheduler:
    """Serves requests by priority, then arrival.

    Running requests come first: each decode gets its token, prefills share what is left of the token budget, and
    waiting requests are admitted, strictly in order, while there is budget, a place, and blocks for all their tokens
    (see `BlockManager.admit`). A decode that needs a block when none is free takes those of the running request that is
    served last; that one waits in its order and recomputes, or finds its blocks still in the prefix cache.
    """

    def __init__(
        self,
        block_manager: BlockManager,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
    ) -> None:
        """Raises ConfigError if the sizes do not go together.

        Args:
          block_manager: The KV cache's blocks.
          max_num_seqs: Most requests running at a time (R).
          max_num_batched_tokens: The token budget of a step (T).
          max_model_len: Most tokens of a request, prompt and output together.
        """
        if max_num_seqs < 1 or max_model_len < 1:
            raise ConfigError(f"max_num_seqs={max_num_seqs} and max_model_len={max_model_len} must be at least 1")
        if max_num_batched_tokens < max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens={max_num_batched_tokens} is less than max_num_seqs={max_num_seqs}, so not "
                "every running request could decode in a step: raise the one or lower the other"
            )
        self.block_manager = block_manager
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_model_len = max_model_len
        self._unfinished: dict[str, Request] = {}
        self._waiting = WaitingQueue()
        # In service order. A victim is taken from the end while decodes are scheduled from the front, and prefills take
        # from nobody; so a request scheduled in this step is never preempted in it.
        self._running: list[Request] = []
        self._preempted_ids: list[str] = []

    @property
    def has_unfinished(self) -> bool:
        return bool(self._unfinished)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Requests not admitted yet, and preempted ones."""
        return len(self._unfinished) - len(self._running)

    def add_request(self, request: Request) -> None:
        """Queues a request.

        Raises:
          RequestError: Its id is in use, its prompt is empty or leaves no room to generate, or it could outgrow the
            KV cache.
        """
        name = f"request {request.request_id!r}"
        if request.request_id in self._unfinished:
            raise RequestError(f"{name} exists already: wait for it, abort it, or choose another id")
        if request.num_prompt_tokens == 0:
            raise RequestError(f"{name} has an empty prompt: give at least one token")
        if request.max_total_tokens > self.max_model_len:
            raise RequestError(
                f"{name} may grow to {request.max_total_tokens} tokens, more than max_model_len={self.max_model_len}: "
                "shorten its prompt or lower max_tokens"
            )
        if request.num_tokens >= request.max_total_tokens:
            raise RequestError(
                f"{name} has {request.num_tokens} tokens, which leaves none to generate of at most "
                f"{request.max_total_tokens} in all (max_model_len={self.max_model_len}): shorten its prompt"
            )
        # The last token is sampled and returned, but never computed.
        shortage = self.block_manager.shortage(request.max_total_tokens - 1, self.max_num_batched_tokens)
        if shortage is not None:
            num_needed, num_blocks = shortage
            raise RequestError(
                f"{name} may need {num_needed} KV cache blocks of {self.block_manager.block_size} tokens, and there "
                f"are {num_blocks}: shorten its prompt, lower max_tokens, or enlarge the cache"
            )
        self._unfinished[request.request_id] = request
        self._waiting.push(request)

    def abort_request(self, request_id: str) -> Request | None:
        """Ends a request at once; its tokens in flight are dropped. Returns it, or None if it is not unfinished."""
        return self.finish_request(request_id, RequestStatus.FINISHED_ABORTED)

    def finish_request(
        self, request_id: str, status: RequestStatus, stop_reason: int | str | None = None
    ) -> Request | None:
        """Ends a request for a reason found outside, such as a stop text; its tokens in flight are dropped.

        Returns:
          The request, or None if no unfinished one has this id (it may just have ended by itself).
        """
        if not status.finished:
            raise ValueError(f"{status} does not finish a request")
        request = self._unfinished.get(request_id)
        if request is not None:
            self._finish(request, status, stop_reason)
        return request

    def schedule(self) -> SchedulerOutput | None:
        """Builds the next step, and counts its tokens as computed.

        Returns:
          The step, or None when nothing can run: no request is left, or all wait for tokens in flight.
        """
        decodes: list[ScheduledRequest] = []
        prefills: list[ScheduledRequest] = []
        num_preempted_before = len(self._preempted_ids)
        prefilling = self._schedule_decodes(decodes)
        budget = self.max_num_batched_tokens - len(decodes)
        all_have_blocks = True
        for request in prefilling:
            if budget == 0:
                break
            # Where layers keep a window, a prefill gets blocks chunk by chunk. It may have to wait for decodes to end.
            if self.block_manager.allocate(request, _chunk_end(request, budget)):
                budget -= _schedule_tokens(request, budget, prefills)
            else:
                all_have_blocks = False
        # Blocks are short in a step that preempts: what it freed is for those who run.
        if all_have_blocks and len(self._preempted_ids) == num_preempted_before:
            self._admit_waiting(budget, decodes, prefills)
        if not decodes and not prefills:
            return None
        # Registered before the step has run: whoever finds these blocks reads them in a later step.
        for entry in prefills:
            self.block_manager.cache_full_blocks(entry.request)
        preempted, self._preempted_ids = tuple(self._preempted_ids), []
        return SchedulerOutput((*decodes, *prefills), len(decodes), preempted)

    def update(self, output: SchedulerOutput, sampled_token_ids: Sequence[int]) -> list[tuple[Request, int]]:
        """Takes in a step's sampled tokens; to be called once for every step, in the order of dispatch.

        Args:
          output: The step.
          sampled_token_ids: One for each entry of `output.scheduled`; ignored where the entry does not sample.

        Returns:
          Each unfinished request's new token. A token that ends a request is among them; look at its status.
        """
        new_tokens: list[tuple[Request, int]] = []
        for entry, token_id in zip(output.scheduled, sampled_token_ids, strict=True):
            if not entry.samples:
                continue
            request = entry.request
            request.num_inflight_tokens -= 1
            if request.status.finished:
                continue
            request.output_token_ids.append(token_id)
            new_tokens.append((request, token_id))
            self.block_manager.cache_full_blocks(request)
            ending = request.ending()
            if ending is not None:
                self._finish(request, *ending)
        return new_tokens

    def _schedule_decodes(self, decodes: list[ScheduledRequest]) -> list[Request]:
        """Schedules the running requests' decodes; returns the running requests that are still in their prefill."""
        prefilling: list[Request] = []
        index = 0
        while index < len(self._running):
            request = self._running[index]
            index += 1
            start, stop = request.num_computed_tokens, request.num_tokens_with_inflight
            if start + 1 != stop or start < request.num_prompt_tokens:
                prefilling.append(request)
            # Where no other token may be sampled, the request ends with the token in flight.
            elif stop < request.max_total_tokens and self._allocate_or_preempt(request):
                decodes.append(ScheduledRequest(request, start, 1, True))
                request.num_computed_tokens = stop
                request.num_inflight_tokens += 1
        return prefilling

    def _allocate_or_preempt(self, request: Request) -> bool:
        """Gets the running request room for one more token; returns False if it was preempted itself."""
        while not self.block_manager.allocate(request, request.num_computed_tokens + 1):
            victim = self._running.pop()
            self._preempt(victim)
            if victim is request:
                return False
        return True

    def _admit_waiting(self, budget: int, decodes: list[ScheduledRequest], prefills: list[ScheduledRequest]) -> None:
        while budget > 0 and len(self._running) < self.max_num_seqs:
            request = self._waiting.head()
            # A preempted request with a token in flight cannot be computed anew before the host knows that token.
            if request is None or request.num_inflight_tokens > 0:
                return
            blocks = self.block_manager
            prefix = blocks.get_cached_prefix(request)
            num_tokens = min(request.num_tokens, prefix[0].stop * blocks.block_size + budget)
            if not blocks.admit(request, prefix, num_tokens, self.max_num_batched_tokens):
                return
            self._waiting.pop()
            bisect.insort(self._running, request, key=attrgetter("service_order"))
            request.status = RequestStatus.RUNNING
            budget -= _schedule_tokens(request, budget, decodes if _is_decode(request) else prefills)

    def _preempt(self, request: Request) -> None:
        self.block_manager.free(request)
        request.status = RequestStatus.PREEMPTED
        request.num_preemptions += 1
        self._preempted_ids.append(request.request_id)
        self._waiting.push(request)

    def _finish(self, request: Request, status: RequestStatus, stop_reason: int | str | None) -> None:
        if request.status is RequestStatus.RUNNING:
            self._running.remove(request)
        request.status = status
        request.stop_reason = stop_reason
        self.block_manager.free(request)
        del self._unfinished[request.request_id]


def _is_decode(request: Request) -> bool:
    """Whether just one token, which was sampled, is left to compute."""
    num_computed_tokens = request.num_computed_tokens
    return (
        num_computed_tokens >= request.num_prompt_tokens and num_computed_tokens + 1 == request.num_tokens_with_inflight
    )


def _chunk_end(request: Request, budget: int) -> int:
    """How many tokens are computed after a step that computes at most `budget` more."""
    return min(request.num_tokens_with_inflight, request.num_computed_tokens + budget)


def _schedule_tokens(request: Request, budget: int, scheduled: list[ScheduledRequest]) -> int:
    """Schedules as many of the request's tokens as the budget allows; returns how many."""
    start, stop = request.num_computed_tokens, _chunk_end(request, budget)
    num_tokens = stop - start
    samples = stop == request.num_tokens_with_inflight
    scheduled.append(ScheduledRequest(request, start, num_tokens, samples))
    request.num_computed_tokens += num_tokens
    request.num_inflight_tokens += samples
    return num_tokens
