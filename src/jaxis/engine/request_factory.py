"""Checks the arguments of requests and builds the requests of an engine."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as AbstractSequence
from typing import TYPE_CHECKING, Any

from jaxis.engine.execution.feature import RequestFeature
from jaxis.engine.execution.sequence_sampling import (
    SequenceSampling,
    SuppressedTokens,
    draw_seed,
    sequence_seed,
    tokenize_bad_words,
)
from jaxis.engine.output_processor import CompletionState, Request
from jaxis.engine.scheduling.sequence import Sequence, SequenceId
from jaxis.errors import RequestError
from jaxis.prompts import checked_token_ids
from jaxis.sampling_params import SamplingParams

if TYPE_CHECKING:
    from jaxis.engine.grammar.matcher import Grammar
    from jaxis.tokenizer import Tokenizer


class RequestFactory:
    """Maker of an engine's requests.

    Args:
      tokenizer: The checkpoint's tokenizer, if it has one.
      eos_token_ids: Tokens that end a sequence.
      suppressed: Tokens that are never generated.
      vocab_size: V.
      max_model_len: Maximum number of tokens in a sequence, prompt and output together.
      seed: Seed for requests that bring none.
      defaults: Values of sampling parameters for requests that leave them at None.
      features: Features that check the sampling parameters of requests.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        eos_token_ids: frozenset[int],
        suppressed: SuppressedTokens,
        *,
        vocab_size: int,
        max_model_len: int,
        seed: int,
        defaults: Mapping[str, Any],
        features: Iterable[RequestFeature],
    ) -> None:
        self._tokenizer, self._eos_token_ids, self._suppressed = tokenizer, eos_token_ids, suppressed
        self._vocab_size, self._max_model_len = vocab_size, max_model_len
        self._seed, self._defaults, self._features = seed, defaults, features
        self._num_requests = 0

    def make(
        self,
        request_id: str,
        prompt_token_ids: list[int],
        params: SamplingParams,
        *,
        prompt: str | None,
        priority: int,
        client: str | None,
        cache_salt: str | None,
        grammar: Grammar | None,
    ) -> Request:
        """Returns a request for `params.n` completions; the arguments are those of `LLMEngine.add_request`, checked."""
        if missing := {name: value for name, value in self._defaults.items() if getattr(params, name) is None}:
            params = dataclasses.replace(params, **missing)
        for feature in self._features:
            feature.check_params(params, len(prompt_token_ids))
        params.check_scores()
        self._num_requests += 1
        seed = draw_seed(self._seed, self._num_requests) if params.seed is None else params.seed
        request = Request(request_id, prompt, prompt_token_ids, params, seed)
        bad_words = self._bad_words(params)
        max_tokens = self._max_model_len if params.max_tokens is None else params.max_tokens
        max_total = max(len(prompt_token_ids) + 1, min(self._max_model_len, len(prompt_token_ids) + max_tokens))
        for index in range(params.n):
            sequence = Sequence(
                SequenceId(request_id, index),
                prompt_token_ids,
                params,
                self._eos_token_ids,
                max_total,
                arrival=self._num_requests,
                priority=priority,
                client=client,
                cache_salt=cache_salt,
            )
            sampling = SequenceSampling(
                params,
                prompt_token_ids=prompt_token_ids,
                output_token_ids=sequence.output_token_ids,
                vocab_size=self._vocab_size,
                seed=sequence_seed(seed, index),
                eos_token_ids=() if params.ignore_eos else self._eos_token_ids,
                bad_words_token_ids=bad_words,
                suppressed=self._suppressed,
                grammar=None if grammar is None else grammar.new_matcher(params.stop_token_ids),
            )
            request.completions.append(CompletionState(request, sequence, sampling, self._tokenizer))
        return request

    def checked_prompt(self, token_ids: AbstractSequence[int], *, spare: int = 1) -> list[int]:
        """Checks the token ids, and returns them as a list.

        Raises:
          RequestError: There are none, an unknown one, or too many for `spare` more.
        """
        if len(token_ids) == 0:
            raise RequestError("the prompt is empty: give at least one token")
        if len(token_ids) + spare > self._max_model_len:
            raise RequestError(
                f"the prompt has {len(token_ids)} tokens, and max_model_len={self._max_model_len} must hold it and at "
                "least one more: shorten it, or start with a larger max_model_len"
            )
        return checked_token_ids(token_ids, self._vocab_size)

    def check_needs_no_tokenizer(self, params: SamplingParams) -> None:
        """Raises a RequestError for parameters that are texts if there is no tokenizer."""
        if self._tokenizer is not None:
            return
        for name, texts in (("stop", params.stop), ("bad_words", params.bad_words)):
            if texts:
                raise RequestError("needs a tokenizer, and the checkpoint has none: use token ids instead", param=name)

    def _bad_words(self, params: SamplingParams) -> AbstractSequence[AbstractSequence[int]]:
        if not params.bad_words or self._tokenizer is None:
            return ()
        encode = functools.partial(self._tokenizer.encode, add_special_tokens=False)
        return tokenize_bad_words(params.bad_words, encode, self._vocab_size)
