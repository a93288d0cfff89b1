"""Decides when the readers of streams run, so that they leave processor time to the engine."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable

from jaxis.outputs import FIRST_VERSION, CompletionOutput, RequestOutput


class OutputStream:
    """Holds the outputs that a coroutine has not read yet. Belongs to the event loop.

    Outputs that arrive while the coroutine is busy are merged into one, so a slow reader holds no more than its answer.

    Attributes:
      ended: The request has finished or failed: no more outputs will come.
      begun: The coroutine has read something.
    """

    def __init__(self) -> None:
        self.ended = False
        self.begun = False
        self._pending: RequestOutput | None = None
        self._last: RequestOutput | None = None  # what the next tokens are an addition to
        self._error: Exception | None = None
        self._arrived = asyncio.Event()

    def put(self, output: RequestOutput) -> None:
        """Adds the output of a step, unless the stream has ended; the coroutine sees it after `wake`."""
        if not self.ended:
            self._add(output)
            self.ended = output.finished

    def put_tokens(self, text: str, token_ids: list[int]) -> None:
        """As `put`, of new text and tokens of the only completion; an output was put before."""
        if self.ended:
            return
        if self._pending is not None and self._pending.outputs:
            completion = self._pending.outputs[0]
            completion.text += text
            completion.token_ids += token_ids
            return
        assert self._last is not None
        last = self._last
        self._add(
            RequestOutput(
                request_id=last.request_id,
                prompt=None,
                prompt_token_ids=[],
                prompt_logprobs=None,
                outputs=[CompletionOutput(0, text, token_ids)],
                finished=False,
                num_cached_tokens=last.num_cached_tokens,
                first_scheduled_time=last.first_scheduled_time,
                first_token_time=last.first_token_time,
                seed=last.seed,
            )
        )

    def wake(self) -> None:
        """Lets the coroutine read what was put."""
        if self._pending is not None:
            self._arrived.set()

    def fail(self, error: Exception) -> None:
        """Ends the stream with an error, which is raised once all earlier outputs were read."""
        if not self.ended:
            self.ended = True
            self._error = error
            self._arrived.set()

    async def get(self) -> RequestOutput:
        """Waits for outputs, and returns those that arrived since the last call as one.

        Raises:
          JaxisError: The request failed.
        """
        await self._arrived.wait()
        output, self._pending = self._pending, None
        if output is None:
            assert self._error is not None
            raise self._error
        self.begun = True
        if self._error is None:
            self._arrived.clear()
        return output

    def _add(self, output: RequestOutput) -> None:
        self._pending = output if self._pending is None else merge_outputs((self._pending, output))
        self._last = self._pending


def merge_outputs(outputs: Iterable[RequestOutput]) -> RequestOutput:
    """Merges consecutive deltas of one request into the first, which it modifies."""
    outputs = iter(outputs)
    merged = next(outputs)
    completions = {completion.index: completion for completion in merged.outputs}
    for output in outputs:
        for new in output.outputs:
            if new.index in completions:
                _extend(completions[new.index], new)
            else:
                completions[new.index] = new
        merged.finished = output.finished
        merged.kv_transfer_params = merged.kv_transfer_params or output.kv_transfer_params
        merged.prompt_logprobs = merged.prompt_logprobs or output.prompt_logprobs
    merged.outputs = [completions[index] for index in sorted(completions)]
    return merged


def _extend(completion: CompletionOutput, new: CompletionOutput) -> None:
    if new.weight_versions is not None:
        before = completion.weight_versions or [FIRST_VERSION] * len(completion.token_ids)
        completion.weight_versions = [*before, *new.weight_versions]
    completion.text += new.text
    completion.token_ids += new.token_ids
    if completion.logprobs is not None:
        completion.logprobs += new.logprobs or []
    if completion.kept_mass is not None:
        completion.kept_mass += new.kept_mass or []
    completion.cumulative_logprob = new.cumulative_logprob
    completion.finish_reason = new.finish_reason
    completion.stop_reason = new.stop_reason
    completion.num_accepted_predictions = new.num_accepted_predictions
    completion.num_rejected_predictions = new.num_rejected_predictions
    completion.routed_experts = new.routed_experts
    completion.num_drafts, completion.num_accepted_drafts = new.num_drafts, new.num_accepted_drafts


# Decides when the readers of streams run, so that they leave processor time to the engine.


REST_FACTOR = 9.0  # seconds of rest for each second of work


class StreamWaker:
    """Wakes the coroutines that read streams, and spends at most a tenth of the event loop's time on them.

    The readers format and send every token: with many streams and a fast model they would use as much processor time as
    the model, which computes on the same processors. After each round they rest for nine times as long as the round
    took, and outputs that arrive meanwhile are sent together. With few streams, or steps longer than the rest, nothing
    is delayed. A stream's first and last outputs never wait.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._ready: dict[OutputStream, None] = {}
        self._is_resting = False

    def wake(self, streams: Iterable[OutputStream]) -> None:
        """Wakes the readers of streams with new outputs, now or after the rest."""
        for stream in streams:
            if stream.ended or not stream.begun:
                stream.wake()
            else:
                self._ready[stream] = None
        if not self._is_resting:
            self._wake_ready()

    def _wake_ready(self) -> None:
        streams, self._ready = self._ready, {}
        self._is_resting = bool(streams)
        if streams:
            start = time.monotonic()
            for stream in streams:
                stream.wake()
            self._loop.call_soon(self._rest, start)  # comes after the readers

    def _rest(self, start: float) -> None:
        self._loop.call_later(REST_FACTOR * (time.monotonic() - start), self._wake_ready)
