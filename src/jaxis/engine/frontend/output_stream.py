"""A request's way from the engine's thread to the coroutine that waits for it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from jaxis.engine.output_processor import RequestState
from jaxis.outputs import CompletionOutput, RequestOutput


class DeltaTracker:
    """What of a request was already handed out. Belongs to the engine's thread.

    Attributes:
      state: The request in the engine.
      stream: Where its outputs go; handed on, never looked into.
      final_only: Hand everything out at the end.
      first_token_time: When the first token was there, as `time.monotonic` seconds.
    """

    def __init__(self, state: RequestState, stream: OutputStream | str, *, final_only: bool = False) -> None:
        self.state = state
        self.stream = stream
        self.final_only = final_only
        self.first_token_time: float | None = None
        self._num_sent = [0] * len(state.sequences)
        self._ended = [False] * len(state.sequences)
        self._sent_prompt_logprobs = False

    def take(self) -> RequestOutput:
        """Whatever is new since the last call: `outputs` holds the completions with something new, each only that."""
        state = self.state
        outputs = []
        for index, sequence in enumerate(state.sequences):
            if self._ended[index]:
                continue
            new = sequence.tokens_since(self._num_sent[index])
            if not new.token_ids and not new.finished:
                continue
            new.text = sequence.delta()
            self._num_sent[index] += len(new.token_ids)
            self._ended[index] = new.finished
            outputs.append(new)
        request = state.sequences[0].request
        return RequestOutput(
            request_id=state.request_id,
            prompt=state.prompt,
            prompt_token_ids=state.prompt_token_ids,
            prompt_logprobs=self._take_prompt_logprobs(),
            outputs=outputs,
            finished=state.finished,
            num_cached_tokens=request.num_cached_tokens,
            first_scheduled_time=request.first_scheduled_time,
            first_token_time=self.first_token_time,
        )

    def _take_prompt_logprobs(self) -> list | None:
        state = self.state
        if state.params.prompt_logprobs is None or self._sent_prompt_logprobs:
            return None
        self._sent_prompt_logprobs = True
        return [state.prompt_logprobs.get(i) for i in range(len(state.prompt_token_ids))]


class OutputStream:
    """Holds what a coroutine has not taken yet. Belongs to the event loop.

    What arrives while the coroutine is busy becomes one output, so a slow reader costs no more than its answer.

    Attributes:
      ended: No more will come: the request has finished, or failed.
      begun: The coroutine has had something.
    """

    def __init__(self) -> None:
        self.ended = False
        self.begun = False
        self._pending: list[RequestOutput] = []
        self._error: Exception | None = None
        self._arrived = asyncio.Event()

    def put(self, output: RequestOutput) -> None:
        """Takes in what a step brought, for `wake` to tell of; nothing if the stream has ended."""
        if not self.ended:
            self._pending.append(output)
            self.ended = output.finished

    def wake(self) -> None:
        """Lets the coroutine have what was put."""
        if self._pending:
            self._arrived.set()

    def fail(self, error: Exception) -> None:
        """Ends the stream with an error, raised once what came before it was taken."""
        if not self.ended:
            self.ended = True
            self._error = error
            self._arrived.set()

    async def get(self) -> RequestOutput:
        """What has come since the last call, at least one output's worth.

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
    """Consecutive deltas of one request as one; changes the first."""
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
    completion.finish_reason = new.finish_reason
    completion.stop_reason = new.stop_reason
