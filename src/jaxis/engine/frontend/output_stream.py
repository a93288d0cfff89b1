"""Queues outputs that a request's coroutine has not read yet."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from jaxis.outputs import CompletionOutput, RequestOutput


class OutputStream:
    """Holds the outputs that a coroutine has not read yet. Belongs to the event loop.

    Outputs that arrive while the coroutine is busy are merged into one, so a slow reader holds no more than its answer.

    Attributes:
      ended: The request has finished or failed: no more will come.
      begun: The coroutine has read something.
    """

    def __init__(self) -> None:
        self.ended = False
        self.begun = False
        self._pending: list[RequestOutput] = []
        self._error: Exception | None = None
        self._arrived = asyncio.Event()

    def put(self, output: RequestOutput) -> None:
        """Adds the output of a step, unless the stream has ended; the coroutine sees it after `wake`."""
        if not self.ended:
            self._pending.append(output)
            self.ended = output.finished

    def wake(self) -> None:
        """Lets the coroutine read what was put."""
        if self._pending:
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
        if not self._pending and self._error is not None:
            raise self._error
        output = merge_outputs(self._pending)
        self._pending = []
        self.begun = True
        if self._error is None:
            self._arrived.clear()
        return output


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
        merged.prompt_logprobs = merged.prompt_logprobs or output.prompt_logprobs
    merged.outputs = [completions[index] for index in sorted(completions)]
    return merged


def _extend(completion: CompletionOutput, new: CompletionOutput) -> None:
    completion.text += new.text
    completion.token_ids += new.token_ids
    if completion.logprobs is not None:
        completion.logprobs += new.logprobs or []
    completion.cumulative_logprob = new.cumulative_logprob
    completion.finish_reason = new.finish_reason
    completion.stop_reason = new.stop_reason
