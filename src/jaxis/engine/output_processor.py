"""From sampled tokens to what a request returns: text, stop strings, log-probabilities."""

from __future__ import annotations

from typing import TYPE_CHECKING

from jaxis.engine.execution.request_sampling import RequestSampling
from jaxis.engine.execution.sampler import TokenLogprobs
from jaxis.engine.scheduling.sequence import Request
from jaxis.errors import JaxisError
from jaxis.outputs import CompletionOutput, Logprob, RequestOutput
from jaxis.sampling_params import SamplingParams
from jaxis.tokenizer.detokenizer import IncrementalDetokenizer

if TYPE_CHECKING:
    from jaxis.tokenizer import Tokenizer


class RequestState:
    """A user's request and its sequences, one for each of `n`.

    Attributes:
      prompt_logprobs: For each prompt token but the first, once known.
      error: Why the request ended without its completions; None if it did not.
    """

    def __init__(
        self,
        request_id: str,
        prompt: str | None,
        prompt_token_ids: list[int],
        params: SamplingParams,
    ) -> None:
        self.request_id = request_id
        self.prompt = prompt
        self.prompt_token_ids = prompt_token_ids
        self.params = params
        self.sequences: list[SequenceState] = []
        self.prompt_logprobs: dict[int, dict[int, Logprob]] = {}
        self.error: JaxisError | None = None

    @property
    def finished(self) -> bool:
        if self.error is not None:
            return True
        # A loop: asked several times for every token, `all` with its generator would show.
        for sequence in self.sequences:  # noqa: SIM110
            if not sequence.request.status.finished:
                return False
        return True

    def output(self) -> RequestOutput:
        """The request as it stands."""
        prompt_logprobs = None
        if self.params.prompt_logprobs is not None:
            prompt_logprobs = [self.prompt_logprobs.get(i) for i in range(len(self.prompt_token_ids))]
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt,
            prompt_token_ids=self.prompt_token_ids,
            prompt_logprobs=prompt_logprobs,
            outputs=[sequence.completion() for sequence in self.sequences],
            finished=self.finished,
            num_cached_tokens=self.sequences[0].request.num_cached_tokens,
        )


class SequenceState:
    """One sequence of a request, from its tokens to its text.

    Attributes:
      parent: The user's request.
      request: As the scheduler sees it.
      sampling: As the sampler sees it.
    """

    def __init__(
        self,
        parent: RequestState,
        request: Request,
        sampling: RequestSampling,
        index: int,
        tokenizer: Tokenizer | None,
    ) -> None:
        self.parent = parent
        self.request = request
        self.sampling = sampling
        self._index = index
        self._tokenizer = tokenizer
        self._logprobs: list[dict[int, Logprob]] = []
        self._cumulative_logprob = 0.0
        self._stop: str | None = None
        self._detokenizer: IncrementalDetokenizer | None = None
        params = parent.params
        if tokenizer is not None and params.detokenize:
            self._detokenizer = IncrementalDetokenizer(
                tokenizer,
                parent.prompt_token_ids,
                stop=params.stop,
                include_stop_str_in_output=params.include_stop_str_in_output,
                skip_special_tokens=params.skip_special_tokens,
            )

    def add_token(self, token_id: int, logprobs: TokenLogprobs | None, row: int) -> str | None:
        """Takes in a sampled token that the scheduler has counted.

        Args:
          token_id: The token.
          logprobs: The step's, if any request of it wants them.
          row: The sequence's row of them.

        Returns:
          The stop string that the text now holds, if one.
        """
        params = self.parent.params
        if params.logprobs is not None and logprobs is not None:
            entry = self._entry(token_id, logprobs, row, params.logprobs)
            self._logprobs.append(entry)
            self._cumulative_logprob += entry[token_id].logprob
        if self._detokenizer is None:
            return None
        ended_by_token = self.request.status.finish_reason == "stop"
        if ended_by_token and not params.include_stop_str_in_output:
            return None
        may_stop = len(self.request.output_token_ids) > params.min_tokens
        return self._detokenizer.update([token_id], may_stop=may_stop)

    def add_prompt_logprobs(self, start: int, logprobs: TokenLogprobs) -> None:
        """Takes in the log-probabilities of the prompt tokens that follow positions `start`, `start + 1`, ..."""
        num_wanted = self.parent.params.prompt_logprobs
        if self._index != 0 or num_wanted is None:
            return
        for row in range(len(logprobs.logprobs)):
            position = start + row + 1
            token_id = self.parent.prompt_token_ids[position]
            self.parent.prompt_logprobs[position] = self._entry(token_id, logprobs, row, num_wanted)

    def finish(self, stop: str | None = None) -> None:
        """The sequence has ended: lets go of text that was held back for a stop string."""
        self._stop = stop
        if self._detokenizer is not None:
            self._detokenizer.finish()

    def completion(self) -> CompletionOutput:
        """The sequence as it stands."""
        completion = self.tokens_since(0)
        if self._detokenizer is not None:
            completion.text = self._detokenizer.text
        if self.parent.params.logprobs is not None:
            completion.cumulative_logprob = self._cumulative_logprob
        return completion

    def tokens_since(self, start: int) -> CompletionOutput:
        """The sequence from its output token `start` on, without text."""
        status = self.request.status
        return CompletionOutput(
            index=self._index,
            token_ids=self.request.output_token_ids[start:],
            logprobs=self._logprobs[start:] if self.parent.params.logprobs is not None else None,
            finish_reason="stop" if self._stop is not None else status.finish_reason,
            stop_reason=self._stop if self._stop is not None else self.request.stop_reason,
        )

    def delta(self) -> str:
        """Text that is decided since the last call."""
        return self._detokenizer.delta() if self._detokenizer is not None else ""

    def _entry(self, token_id: int, logprobs: TokenLogprobs, row: int, num_wanted: int) -> dict[int, Logprob]:
        """The given token first, then the `num_wanted` most likely."""
        entry = {token_id: (float(logprobs.logprobs[row]), int(logprobs.ranks[row]))}
        for rank, other in enumerate(logprobs.top_ids[row][:num_wanted].tolist(), start=1):
            entry.setdefault(other, (float(logprobs.top_logprobs[row, rank - 1]), rank))
        text = self._tokenizer.token_text if self._tokenizer is not None else lambda _: None
        return {id_: Logprob(logprob, rank, text(id_)) for id_, (logprob, rank) in entry.items()}
