"""Outputs of a request that its reader has not read yet, merged into one."""

from __future__ import annotations

import asyncio

from jaxis.outputs import CompletionOutput, RequestOutput, merge_outputs


class OutputStream:
    """Holds the outputs that a coroutine has not read yet. Belongs to the event loop.

    Outputs that arrive while the coroutine is busy are merged into one, so a slow reader holds no more than its answer.

    Attributes:
      ended: True if the request has finished or failed; no more outputs follow.
      begun: True if the coroutine has read an output.
    """

    def __init__(self) -> None:
        self.ended = False
        self.begun = False
        self._pending: RequestOutput | None = None
        self._last: RequestOutput | None = None  # the output that the next tokens extend
        self._error: Exception | None = None
        self._arrived = asyncio.Event()

    def put(self, output: RequestOutput) -> None:
        """Adds the output of a step, unless the stream has ended; the coroutine sees it after `wake`."""
        if not self.ended:
            self._add(output)
            self.ended = output.finished

    def put_tokens(self, text: str, token_ids: list[int]) -> None:
        """Adds new text and tokens of the only completion, as `put` does. An earlier output must have been put."""
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
        """Wakes the coroutine if it has outputs to read."""
        if self._pending is not None:
            self._arrived.set()

    def fail(self, error: Exception) -> None:
        """Ends the stream with an error, which is raised after all earlier outputs were read."""
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
