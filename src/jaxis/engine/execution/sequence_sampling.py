"""A sequence's sampling parameters, prepared for the model's vocabulary and updated as its output grows."""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from jaxis.engine.execution.token_history import TokenHistory
from jaxis.engine.grammar.token_mask import is_allowed, pack_token_ids
from jaxis.errors import RequestError
from jaxis.sampling_params import SamplingParams

if TYPE_CHECKING:
    from jaxis.engine.grammar.matcher import Matcher


@dataclass(frozen=True)
class SuppressedTokens:
    """Tokens that a checkpoint never generates.

    Attributes:
      anywhere: Tokens that are suppressed at every place.
      first: Tokens that are suppressed as the first token of an output.
      sequences: Sequences whose last token is suppressed after the others, of which some may be the prompt's.
    """

    anywhere: frozenset[int] = frozenset()
    first: frozenset[int] = frozenset()
    sequences: tuple[tuple[int, ...], ...] = ()


NOTHING_SUPPRESSED = SuppressedTokens()


class SequenceSampling:
    """The sampling state of one sequence, kept from step to step.

    Attributes:
      params: The sequence's parameters.
      output_token_ids: The sequence's own list, which grows as tokens are generated.
      seed: 64-bit seed of its random numbers.
      allowed_ids: int32, the tokens it may generate; empty allows all.
      grammar: Matcher of the grammar, at the end of the output; None allows any output.
      takes_argmax: True if every token is simply the most likely one, with no log-probabilities asked for.
    """

    def __init__(
        self,
        params: SamplingParams,
        *,
        prompt_token_ids: Sequence[int],
        output_token_ids: list[int],
        vocab_size: int,
        seed: int,
        eos_token_ids: Iterable[int] = (),
        bad_words_token_ids: Iterable[Sequence[int]] = (),
        suppressed: SuppressedTokens = NOTHING_SUPPRESSED,
        grammar: Matcher | None = None,
    ) -> None:
        """Prepares a sequence.

        Args:
          params: The sequence's parameters.
          prompt_token_ids: The prompt.
          output_token_ids: The sequence's live list of generated tokens.
          vocab_size: Size of the vocabulary (V).
          seed: Seed from `sequence_seed`.
          eos_token_ids: The model's end-of-sequence ids, which `min_tokens` holds back along with the stop token ids.
          bad_words_token_ids: Token sequences from `tokenize_bad_words`.
          suppressed: Tokens that the checkpoint never generates.
          grammar: Matcher that follows the output.

        Raises:
          RequestError: A token id is not below V, or the parameters together leave no token to generate.
        """
        validate_for_vocab(params, vocab_size)
        self.params = params
        self.output_token_ids = output_token_ids
        self.seed = seed & 0xFFFFFFFFFFFFFFFF
        self.grammar = grammar
        self._masks_ahead: _MasksAhead | None = None
        self.allowed_ids = np.unique(np.asarray(params.allowed_token_ids or [], np.int32))
        self._vocab_size = vocab_size
        self._bias = dict(params.logit_bias or {})
        self._held_back = {int(i) for i in (*eos_token_ids, *params.stop_token_ids)} if params.min_tokens else set()
        bad_words = [tuple(word) for word in bad_words_token_ids]
        self._banned = {word[0] for word in bad_words if len(word) == 1} | suppressed.anywhere
        self._banned_first = suppressed.first
        self._bad_sequences = [word for word in bad_words if len(word) > 1]
        self._suppressed_sequences = suppressed.sequences
        self._longest = max(map(len, (*self._bad_sequences, *suppressed.sequences)), default=0)
        self._prompt_end = tuple(prompt_token_ids[-self._longest :]) if suppressed.sequences else ()
        self._check_satisfiable(set(suppressed.anywhere | suppressed.first))

        # Only the repetition penalty looks at the prompt.
        prompt = prompt_token_ids if params.repetition_penalty != 1.0 else []
        self._history = TokenHistory(prompt, vocab_size) if params.has_penalties else None
        changes_logits = bool(
            self._bias or self._held_back or bad_words or self.allowed_ids.size or params.has_penalties
        )
        changes_logits = changes_logits or bool(suppressed.sequences)
        changes_logits = changes_logits or grammar is not None or bool(self._banned or self._banned_first)
        self.takes_argmax = params.greedy and params.logprobs is None and not changes_logits

    def history(self) -> TokenHistory | None:
        """Returns the tokens that penalties apply to, up to the newest one of the output; None without penalties."""
        if self._history is not None:
            self._history.follow(self.output_token_ids)
        return self._history

    @property
    def needs_newest_token(self) -> bool:
        """True if the host must know the last token before the next one can be sampled."""
        return self._history is not None or self._longest > 0 or self.grammar is not None

    def token_mask(self, drafts: tuple[int, ...] = ()) -> np.ndarray | None:
        """Returns the tokens that the grammar allows next, as `Matcher.token_mask`, int32 [ceil(V / 32)]; None for all.

        `drafts` count as output; from the first draft that cannot follow it, masks are arbitrary.
        """
        if self.grammar is None:
            return None
        self.grammar.follow(self.output_token_ids)
        return self._ahead(self.grammar, drafts).mask(drafts) if drafts else self.grammar.token_mask()

    def favored_token(self, drafts: tuple[int, ...] = ()) -> int | None:
        """Returns the token that is taken next if it is among the likely ones; None if none is favored.

        `drafts` count as output, as in `token_mask`.
        """
        if self.grammar is None:
            return None
        self.grammar.follow(self.output_token_ids)
        return self._ahead(self.grammar, drafts).favored(drafts) if drafts else self.grammar.favored_token()

    def _ahead(self, grammar: Matcher, drafts: tuple[int, ...]) -> _MasksAhead:
        ahead = self._masks_ahead
        if ahead is None or not ahead.covers(self.output_token_ids, drafts):
            ahead = self._masks_ahead = _MasksAhead(grammar, self.output_token_ids)
        return ahead

    def allowed_drafts(self, drafts: Sequence[int]) -> Sequence[int]:
        """Returns the drafts before the first one that the vocabulary or the grammar forbids."""
        for index, token_id in enumerate(drafts):
            mask = self.token_mask(tuple(drafts[:index]))
            if not 0 <= token_id < self._vocab_size or (mask is not None and not is_allowed(mask, token_id)):
                return drafts[:index]
        return drafts

    @property
    def grammar_is_complete(self) -> bool:
        """True if the output matches the grammar, and no token can follow, not even one that ends the completion."""
        if self.grammar is None:
            return False
        self.grammar.follow(self.output_token_ids)
        return self.grammar.is_complete and self._all_banned(set())

    def fault(self) -> RequestError | None:
        """Returns the error if the request itself leaves no token that can come next; None otherwise."""
        mask = self.token_mask()
        if self.grammar is None or mask is None:
            return None
        if self.grammar.error is not None:
            reason = f"after {len(self.output_token_ids)} tokens: {self.grammar.error}"
        elif not mask.any():
            reason = f"no token of the model continues it after {len(self.output_token_ids)}"
        elif self._all_banned(set()):
            reason = "allowed_token_ids has none of the tokens that may come next"
        else:
            return None
        return RequestError(f"cannot be honoured: {reason}", param=self.grammar.param)

    def bias(self, num_inflight: int = 0, drafts: tuple[int, ...] = ()) -> tuple[np.ndarray, np.ndarray]:
        """Returns the biases for the next token: token ids int32 [W] and values float32 [W], -inf for a ban.

        Bad words of several tokens are allowed if no other token could be generated. Every banned token is allowed if
        the grammar allows no other. `num_inflight` tokens were sampled already that `output_token_ids` does not hold
        yet; `drafts` count as output.
        """
        bans = set(self._banned)
        num_tokens = len(self.output_token_ids) + num_inflight + len(drafts)
        if num_tokens < self.params.min_tokens:
            bans |= self._held_back
        if not num_tokens:
            bans |= self._banned_first
        completing = self._last_of_sequences(drafts)
        if completing and not self._all_banned(bans | completing, drafts):
            bans |= completing
        if self.grammar is not None and bans and self._all_banned(bans, drafts):
            bans = set()
        if not bans and not self._bias:
            return _NO_IDS, _NO_BIAS
        bias = self._bias | dict.fromkeys(bans, -np.inf)
        return np.fromiter(bias, np.int32, len(bias)), np.fromiter(bias.values(), np.float32, len(bias))

    def _last_of_sequences(self, drafts: tuple[int, ...]) -> set[int]:
        """Returns the last tokens of the sequences that must not be generated and have been, up to them."""
        if not self._longest:
            return set()
        generated = (*self.output_token_ids[-self._longest :], *drafts)
        return _tokens_after(generated, self._bad_sequences) | _tokens_after(
            (*self._prompt_end, *generated), self._suppressed_sequences
        )

    def _all_banned(self, bans: set[int], drafts: tuple[int, ...] = ()) -> bool:
        mask = self.token_mask(drafts)
        if mask is not None:
            if self.allowed_ids.size:
                mask = mask & pack_token_ids(self.allowed_ids, self._vocab_size)
            return not (mask & ~pack_token_ids(bans, self._vocab_size)).any()
        if self.allowed_ids.size:
            return bans.issuperset(self.allowed_ids.tolist())
        return len(bans) >= self._vocab_size

    def _check_satisfiable(self, suppressed: set[int]) -> None:
        if self.grammar is not None:
            return  # it overrides bans
        where = "allowed_token_ids" if self.allowed_ids.size else "the vocabulary"
        if suppressed and self._all_banned(suppressed):
            raise RequestError(
                f"={self.params.allowed_token_ids} has only tokens that the checkpoint's generation_config.json "
                "suppresses: allow another token",
                param="allowed_token_ids",
            )
        if (banned := self._banned | self._banned_first) and self._all_banned(banned):
            raise RequestError(
                f"={self.params.bad_words!r} ban every token of {where}: allow another token", param="bad_words"
            )
        if self._held_back and self._all_banned(self._banned | self._held_back):
            raise RequestError(
                f"={self.params.min_tokens} and bad_words hold back every token of {where}: allow a token that does "
                "not end the completion, or set min_tokens=0",
                param="min_tokens",
            )


def _tokens_after(token_ids: tuple[int, ...], sequences: Iterable[tuple[int, ...]]) -> set[int]:
    """Returns the last tokens of the sequences whose other tokens these end with."""
    return {sequence[-1] for sequence in sequences if token_ids[1 - len(sequence) :] == sequence[:-1]}


class _MasksAhead:
    """The grammar's masks after drafts: a fork follows each draft once, while the grammar stays at the output's end."""

    def __init__(self, grammar: Matcher, output_token_ids: Sequence[int]) -> None:
        self._fork = grammar.fork()
        self._num_output_tokens = len(output_token_ids)
        self._token_ids = list(output_token_ids)
        self._masks = [grammar.token_mask()]
        self._favored = [grammar.favored_token()]
        self._is_stuck = False

    def covers(self, output_token_ids: Sequence[int], drafts: Sequence[int]) -> bool:
        """Returns whether the masks are for this output, and these drafts do not contradict those seen before."""
        seen = self._token_ids[self._num_output_tokens :]
        return self._num_output_tokens == len(output_token_ids) and all(map(operator.eq, seen, drafts))

    def mask(self, drafts: Sequence[int]) -> np.ndarray:
        self._follow(drafts)
        return self._masks[len(drafts)]

    def favored(self, drafts: Sequence[int]) -> int | None:
        self._follow(drafts)
        return self._favored[len(drafts)]

    def _follow(self, drafts: Sequence[int]) -> None:
        for token_id in drafts[len(self._masks) - 1 :]:
            # A forbidden token, or one after the end, would mark the grammar as broken.
            self._is_stuck = self._is_stuck or not is_allowed(self._masks[-1], token_id)
            self._token_ids.append(token_id)
            if not self._is_stuck:
                self._fork.follow(self._token_ids)
                self._is_stuck = not self._fork.token_mask().any()
            self._masks.append(self._masks[-1] if self._is_stuck else self._fork.token_mask())
            self._favored.append(None if self._is_stuck else self._fork.favored_token())


_NO_IDS = np.empty(0, np.int32)
_NO_BIAS = np.empty(0, np.float32)


def validate_for_vocab(params: SamplingParams, vocab_size: int) -> None:
    """Raises RequestError if a parameter names a token id that the model does not have."""
    for name, token_ids in (
        ("logit_bias", params.logit_bias or ()),
        ("allowed_token_ids", params.allowed_token_ids or ()),
        ("stop_token_ids", params.stop_token_ids),
    ):
        for token_id in token_ids:
            if token_id >= vocab_size:
                raise RequestError(f"holds {token_id}; the model's token ids are 0 to {vocab_size - 1}", param=name)


def tokenize_bad_words(
    bad_words: Sequence[str], encode: Callable[[str], Sequence[int]], vocab_size: int
) -> list[tuple[int, ...]]:
    """Returns the token sequences that spell the bad words, each at the start of a string and after a space.

    Each of `bad_words` is a non-empty string. `encode` turns strings into token ids without special tokens.

    Raises:
      RequestError: A word has no tokens, or one that the model does not have.
    """
    sequences: dict[tuple[int, ...], None] = {}
    for word in bad_words:
        bare = word.lstrip(" ")
        for text in (bare, " " + bare) if bare.strip() else (word,):
            token_ids = tuple(int(token_id) for token_id in encode(text))
            if not token_ids or max(token_ids) >= vocab_size:
                raise RequestError(
                    f"holds {word!r}, which the model's vocabulary cannot spell: leave it out", param="bad_words"
                )
            sequences[token_ids] = None
    return list(sequences)


def draw_seed(engine_seed: int, request_number: int) -> int:
    """Returns the seed of a request that brings none: below 2**53, which every reader of JSON keeps exactly.

    `engine_seed` makes such seeds reproducible; `request_number` counts the engine's requests.
    """
    return _hashed(f"engine {engine_seed} {request_number}") >> 11


def sequence_seed(request_seed: int, completion_index: int = 0) -> int:
    """Returns the 64-bit seed of one of a request's `n` completions.

    The first completion has the request's seed. Further completions get one from a hash, so that no two sequences share
    their random numbers.
    """
    if completion_index == 0:
        return request_seed & 0xFFFFFFFFFFFFFFFF
    return _hashed(f"request {request_seed} {completion_index}")


def _hashed(source: str) -> int:
    return int.from_bytes(hashlib.blake2b(source.encode(), digest_size=8).digest(), "little")
