"""Turns the sampled tokens of a user's request into its output: text, stop strings, log-probabilities."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from jaxis.engine.execution.feature import Record
from jaxis.engine.execution.sequence_sampling import SequenceSampling
from jaxis.engine.scheduling.sequence import Sequence
from jaxis.engine.token_scores import TokenScores, logprob_entry
from jaxis.errors import JaxisError
from jaxis.outputs import CompletionOutput, Logprob, RequestOutput
from jaxis.sampling_params import SamplingParams
from jaxis.tokenizer.detokenizer import IncrementalDetokenizer

if TYPE_CHECKING:
    from jaxis.engine.execution.token_logprobs import TokenLogprobs
    from jaxis.tokenizer import Tokenizer


class Request:
    """A user's request and its completions, one for each of `n`.

    Attributes:
      request_id: Unique among unfinished requests.
      prompt: The prompt's text; None if it was given as token ids.
      prompt_token_ids: The prompt.
      params: Parameters of sampling and stopping.
      seed: The request's seed, or one that was drawn for it.
      completions: Completions; `params.n` of them.
      prompt_logprobs: Log-probabilities by position, for each prompt token but the first, once known.
      error: Reason of failure; None if the request did not fail.
      kv_transfer_params: Value for `RequestOutput`.
    """

    def __init__(
        self,
        request_id: str,
        prompt: str | None,
        prompt_token_ids: list[int],
        params: SamplingParams,
        seed: int,
    ) -> None:
        self.request_id = request_id
        self.prompt = prompt
        self.prompt_token_ids = prompt_token_ids
        self.params = params
        self.seed = seed
        self.completions: list[CompletionState] = []
        self.prompt_logprobs: dict[int, dict[int, Logprob]] = {}
        self.error: JaxisError | None = None
        self.kv_transfer_params: dict[str, Any] | None = None

    @property
    def finished(self) -> bool:
        """Returns whether every completion has ended, or the request has failed."""
        if self.error is not None:
            return True
        # A loop, since this runs several times per token: `all` with a generator would be noticeably slower.
        for completion in self.completions:  # noqa: SIM110
            if not completion.sequence.status.finished:
                return False
        return True

    @property
    def num_cached_tokens(self) -> int:
        """Prompt tokens whose keys and values came from the prefix cache."""
        return self.completions[0].sequence.num_cached_tokens

    def output(self) -> RequestOutput:
        """The output so far."""
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt,
            prompt_token_ids=self.prompt_token_ids,
            prompt_logprobs=self.prompt_logprob_list(),
            outputs=[completion.output() for completion in self.completions],
            finished=self.finished,
            num_cached_tokens=self.num_cached_tokens,
            kv_transfer_params=self.kv_transfer_params,
            seed=self.seed,
        )

    def prompt_logprob_list(self) -> list[dict[int, Logprob] | None] | None:
        """Returns one entry per prompt token, None for the first; None for the whole list if not requested."""
        if self.params.prompt_logprobs is None:
            return None
        return [self.prompt_logprobs.get(position) for position in range(len(self.prompt_token_ids))]


class CompletionState:
    """One completion of a request, from its sampled tokens to its text.

    Attributes:
      request: The request that it belongs to.
      sequence: Its tokens, as the scheduler sees them.
      sampling: Its parameters, as the sampler sees them.
      records: Records that features keep of its tokens, by name.

    Args:
      request: The request that it belongs to.
      sequence: Its tokens, as the scheduler sees them.
      sampling: Its parameters, as the sampler sees them.
      tokenizer: The checkpoint's tokenizer, if it has one.
    """

    def __init__(
        self,
        request: Request,
        sequence: Sequence,
        sampling: SequenceSampling,
        tokenizer: Tokenizer | None,
    ) -> None:
        self.request = request
        self.sequence = sequence
        self.sampling = sampling
        self._index = sequence.seq_id.index
        self._tokenizer = tokenizer
        self.records: dict[str, Record] = {}
        self._scores = None if request.params.logprobs is None else TokenScores(request.params, tokenizer)
        self._stop: str | None = None
        self._detokenizer: IncrementalDetokenizer | None = None
        params = request.params
        if tokenizer is not None and params.detokenize:
            self._detokenizer = IncrementalDetokenizer(
                tokenizer,
                request.prompt_token_ids,
                stop=params.stop,
                include_stop_str_in_output=params.include_stop_str_in_output,
                skip_special_tokens=params.skip_special_tokens,
            )

    def add_token(self, token_id: int, logprobs: TokenLogprobs[np.ndarray] | None, row: int) -> str | None:
        """Processes a sampled token that the scheduler has appended to the sequence.

        Args:
          token_id: The token.
          logprobs: Log-probabilities of the step, if any of its sequences wants them.
          row: The sequence's row in them.

        Returns:
          The stop string that the text now contains, if any.
        """
        params = self.request.params
        if self._scores is not None and logprobs is not None:
            self._scores.add(token_id, logprobs, row)
        if self._detokenizer is None:
            return None
        ended_by_token = self.sequence.status.finish_reason == "stop"
        if ended_by_token and not params.include_stop_str_in_output:
            return None
        may_stop = len(self.sequence.output_token_ids) > params.min_tokens
        return self._detokenizer.update([token_id], may_stop=may_stop)

    def add_prompt_logprobs(self, start: int, logprobs: TokenLogprobs[np.ndarray]) -> None:
        """Records the log-probabilities of the prompt tokens that follow positions `start`, `start + 1`, ..."""
        num_wanted = self.request.params.prompt_logprobs
        if self._index != 0 or num_wanted is None:
            return
        for row in range(len(logprobs.logprobs)):
            position = start + row + 1
            token_id = self.request.prompt_token_ids[position]
            entry = logprob_entry(token_id, logprobs, row, num_wanted, self._tokenizer)
            self.request.prompt_logprobs[position] = entry

    def finish(self, stop: str | None = None) -> None:
        """Ends the completion: releases text that was held back in case a stop string followed."""
        self._stop = stop
        if self._detokenizer is not None:
            self._detokenizer.finish()

    def output(self) -> CompletionOutput:
        """The completion so far."""
        output = self.tokens_since(0)
        if self._detokenizer is not None:
            output.text = self._detokenizer.text
        return output

    def tokens_since(self, start: int) -> CompletionOutput:
        """Returns the completion from output token `start` on, without text; `cumulative_logprob` is of all tokens."""
        output = CompletionOutput(
            index=self._index,
            token_ids=self.sequence.output_token_ids[start:],
            finish_reason="stop" if self._stop is not None else self.sequence.status.finish_reason,
            stop_reason=self._stop if self._stop is not None else self.sequence.stop_reason,
            num_accepted_predictions=self.sequence.num_accepted_predictions,
            num_rejected_predictions=self.sequence.num_rejected_predictions,
            num_drafts=self.sequence.num_drafts,
            num_accepted_drafts=self.sequence.num_accepted_drafts,
        )
        if self._scores is not None:
            self._scores.report(output, start)
        for record in self.records.values():
            record.report(output, self.sequence, start)
        return output

    def new_text(self) -> str:
        """Returns text that became final since the last call."""
        return self._detokenizer.delta() if self._detokenizer is not None else ""
