"""Tracker of the part of a request that was already streamed."""

from __future__ import annotations

from jaxis.engine.output_processor import Request
from jaxis.outputs import Logprob, RequestOutput


class DeltaTracker:
    """Remembers how much of a request was already taken. Belongs to the thread that steps the engine.

    Attributes:
      request: The request in the engine.
    """

    def __init__(self, request: Request) -> None:
        self.request = request
        self._num_taken = [0] * len(request.completions)
        self._ended = [False] * len(request.completions)
        self._took_prompt_logprobs = False

    def take(self, first_token_time: float | None = None) -> RequestOutput:
        """Returns the additions since the last call, without the prompt, which the caller knows.

        `outputs` holds the completions with additions, each with only its new text and tokens; `prompt_logprobs` come
        with the first call.

        Args:
          first_token_time: Value that is copied to the output.
        """
        request = self.request
        outputs = []
        for index, completion in enumerate(request.completions):
            if self._ended[index]:
                continue
            new = completion.tokens_since(self._num_taken[index])
            if not new.token_ids and not new.finished:
                continue
            new.text = completion.new_text()
            self._num_taken[index] += len(new.token_ids)
            self._ended[index] = new.finished
            outputs.append(new)
        return RequestOutput(
            request_id=request.request_id,
            prompt=None,
            prompt_token_ids=[],
            prompt_logprobs=self._take_prompt_logprobs(),
            outputs=outputs,
            finished=request.finished,
            num_cached_tokens=request.num_cached_tokens,
            kv_transfer_params=request.kv_transfer_params,
            first_scheduled_time=request.completions[0].sequence.first_scheduled_time,
            first_token_time=first_token_time,
            seed=request.seed,
        )

    def take_tokens(self) -> tuple[str, list[int]] | None:
        """Returns the additions since the last call if they consist of text and tokens of a single completion.

        Returns:
          The text and the token ids; None, with nothing taken, if there are other additions.
        """
        request = self.request
        told = self._took_prompt_logprobs and len(request.completions) == 1 and request.params.logprobs is None
        if not told or request.finished:
            return None
        completion = request.completions[0]
        if completion.records:
            return None
        token_ids = completion.sequence.output_token_ids[self._num_taken[0] :]
        self._num_taken[0] += len(token_ids)
        return completion.new_text(), token_ids

    def _take_prompt_logprobs(self) -> list[dict[int, Logprob] | None] | None:
        if self._took_prompt_logprobs:
            return None
        self._took_prompt_logprobs = True
        return self.request.prompt_logprob_list()
