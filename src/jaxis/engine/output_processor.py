"""Turns the sampled tokens of a user's request into its output: text, stop strings, log-probabilities."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from jaxis.engine.execution.sequence_sampling import SequenceSampling
from jaxis.engine.routed_experts import RoutedExperts
from jaxis.engine.scheduling.sequence import Sequence
from jaxis.errors import JaxisError
from jaxis.outputs import FIRST_VERSION, CompletionOutput, Logprob, RequestOutput
from jaxis.sampling_params import ALL_LOGPROBS, RAW_LOGPROBS, SamplingParams
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

    Args:
      request: The request that it belongs to.
      sequence: Its tokens, as the scheduler sees them.
      sampling: Its parameters, as the sampler sees them.
      tokenizer: The checkpoint's tokenizer, if it has one.
      expert_id_type: Type of the expert ids that are returned; None if there are no experts.
    """

    def __init__(
        self,
        request: Request,
        sequence: Sequence,
        sampling: SequenceSampling,
        tokenizer: Tokenizer | None,
        expert_id_type: type[np.uint8 | np.uint16] | None = None,
    ) -> None:
        self.request = request
        self.sequence = sequence
        self.sampling = sampling
        self._index = sequence.seq_id.index
        self._tokenizer = tokenizer
        self._logprobs: list[dict[int, Logprob]] = []
        self._cumulative_logprob = 0.0
        mode = request.params.logprobs_mode or RAW_LOGPROBS
        has_mass = request.params.logprobs is not None and mode.startswith("processed")
        self._kept_mass: list[float] | None = [] if has_mass else None
        self._experts = RoutedExperts() if request.params.return_routed_experts else None
        self._expert_id_type = expert_id_type
        self._versions: list[tuple[int, str | int]] = []
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
        if params.logprobs is not None and logprobs is not None:
            entry = self._entry(token_id, logprobs, row, params.logprobs)
            self._logprobs.append(entry)
            self._cumulative_logprob += entry[token_id].logprob
            if self._kept_mass is not None and logprobs.kept_mass is not None:
                self._kept_mass.append(float(logprobs.kept_mass[row]))
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
            self.request.prompt_logprobs[position] = self._entry(token_id, logprobs, row, num_wanted)

    def add_routed_experts(self, start: int, expert_ids: np.ndarray) -> None:
        """Records the experts, [T, layers with experts, k], of the tokens at positions `start`, `start + 1`, ..."""
        if self._experts is not None and self._expert_id_type is not None:
            self._experts.put(start, expert_ids.astype(self._expert_id_type))

    def begin_version(self, version: str | int) -> None:
        """Marks tokens that are added from now on as sampled by weights of this version."""
        self._versions.append((len(self.sequence.output_token_ids), version))

    @property
    def has_versions(self) -> bool:
        """True if the versions of its tokens are reported."""
        return bool(self._versions)

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
        wants_logprobs = self.request.params.logprobs is not None
        return CompletionOutput(
            index=self._index,
            token_ids=self.sequence.output_token_ids[start:],
            cumulative_logprob=self._cumulative_logprob if wants_logprobs else None,
            logprobs=self._logprobs[start:] if wants_logprobs else None,
            kept_mass=None if self._kept_mass is None else self._kept_mass[start:],
            finish_reason="stop" if self._stop is not None else self.sequence.status.finish_reason,
            stop_reason=self._stop if self._stop is not None else self.sequence.stop_reason,
            num_accepted_predictions=self.sequence.num_accepted_predictions,
            num_rejected_predictions=self.sequence.num_rejected_predictions,
            num_drafts=self.sequence.num_drafts,
            num_accepted_drafts=self.sequence.num_accepted_drafts,
            routed_experts=self._routed_experts(),
            weight_versions=self._versions_since(start) if self._versions else None,
        )

    def _versions_since(self, start: int) -> list[str | int]:
        """Returns the versions of the output tokens from `start` on."""
        versions: list[str | int] = [FIRST_VERSION] * len(self.sequence.output_token_ids)
        for first, version in self._versions:
            versions[first:] = [version] * (len(versions) - first)
        return versions[start:]

    def _routed_experts(self) -> np.ndarray | None:
        if self._experts is None or not self.sequence.status.finished or not self.sequence.output_token_ids:
            return None
        num_tokens = self.sequence.num_prompt_tokens + len(self.sequence.output_token_ids)
        return self._experts.between(self.request.params.routed_experts_prompt_start, num_tokens - 1)

    def new_text(self) -> str:
        """Returns text that became final since the last call."""
        return self._detokenizer.delta() if self._detokenizer is not None else ""

    def _entry(
        self, token_id: int, logprobs: TokenLogprobs[np.ndarray], row: int, num_wanted: int
    ) -> dict[int, Logprob]:
        """Returns the given token first, then the `num_wanted` most likely, or all."""
        top_ids = logprobs.top_ids[row] if num_wanted == ALL_LOGPROBS else logprobs.top_ids[row][:num_wanted]
        entry = {token_id: (float(logprobs.logprobs[row]), int(logprobs.ranks[row]))}
        for rank, other in enumerate(top_ids.tolist(), start=1):
            entry.setdefault(other, (float(logprobs.top_logprobs[row, rank - 1]), rank))
        if self._tokenizer is None:
            return {id_: Logprob(logprob, rank) for id_, (logprob, rank) in entry.items()}
        text = self._tokenizer.token_text
        return {id_: Logprob(logprob, rank, text(id_)) for id_, (logprob, rank) in entry.items()}
