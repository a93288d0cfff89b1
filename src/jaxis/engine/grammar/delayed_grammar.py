"""A grammar that applies after the model's reasoning, and that a tool call may replace."""

from __future__ import annotations

import copy
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from jaxis.engine.grammar.compiler import CompiledGrammar, GrammarMatcher
from jaxis.engine.grammar.token_mask import pack_token_ids


@dataclass(frozen=True)
class ReasoningTokens:
    """How reasoning is marked in a completion.

    Attributes:
      opened: The completion begins inside the reasoning.
      opening: If not `opened`, the first token that opens the reasoning; None if there is no reasoning then.
      closings: Sequences of tokens, each of which ends the reasoning.
      gap: Tokens of white space or of markers, one of which may come between reasoning and grammar.
    """

    opened: bool
    opening: int | None
    closings: Sequence[Sequence[int]]
    gap: Collection[int] = ()


class ReasoningTracker:
    """Where one completion's reasoning ends.

    Attributes:
      in_reasoning: The newest token is part of it.
      num_tokens: Its tokens so far, including those that open and close it.
    """

    def __init__(self, reasoning: ReasoningTokens) -> None:
        self.in_reasoning = reasoning.opened
        self.num_tokens = 0
        self._reasoning = reasoning
        self._is_over = False

    def follow(self, output_token_ids: Sequence[int]) -> None:
        """Takes in the tokens generated since the last call."""
        while not self._is_over and self.num_tokens < len(output_token_ids):
            if self.in_reasoning:
                self.num_tokens += 1
                self.in_reasoning = not self._is_closed(output_token_ids)
            elif self.num_tokens == 0 and output_token_ids[0] == self._reasoning.opening:
                self.num_tokens = 1
                self.in_reasoning = True
            self._is_over = not self.in_reasoning

    def _is_closed(self, token_ids: Sequence[int]) -> bool:
        end = self.num_tokens
        return any(
            end >= len(closing) and list(token_ids[end - len(closing) : end]) == list(closing)
            for closing in self._reasoning.closings
        )


class DelayedGrammar:
    """A compiled grammar for what follows the reasoning, unless an alternative begins there.

    Args:
      grammar: The grammar.
      reasoning: How to recognize what comes before it; None if nothing does.
      alternatives: Tokens that may come instead of the grammar's first one; what follows them is unconstrained.
    """

    def __init__(
        self, grammar: CompiledGrammar, reasoning: ReasoningTokens | None, alternatives: Collection[int] = ()
    ) -> None:
        self._grammar = grammar
        self.reasoning = reasoning or ReasoningTokens(opened=False, opening=None, closings=())
        self.alternatives = frozenset(alternatives)

    def new_matcher(self, stop_token_ids: Collection[int] = ()) -> DelayedMatcher:
        """Follows one completion from its start; see `CompiledGrammar.new_matcher`."""
        return DelayedMatcher(self._grammar.new_matcher(stop_token_ids), self.reasoning, self.alternatives)


class DelayedMatcher:
    """Where one completion stands: in its reasoning, or in its grammar. A `Matcher`.

    Within its reasoning, a completion can end only by reaching its greatest length.
    """

    def __init__(self, matcher: GrammarMatcher, reasoning: ReasoningTokens, alternatives: Collection[int]) -> None:
        self._matcher = matcher
        self._tracker = ReasoningTracker(reasoning)
        self._gap_tokens = reasoning.gap
        self._alternatives = alternatives
        self._num_followed = 0
        self._grammar_start: int | None = None  # the first token that it applies to; None while unknown
        self._is_alternative = False
        self._all_tokens = matcher.vocabulary_mask
        self._reasoning_mask = self._all_tokens & ~matcher.end_mask
        opening = [] if reasoning.opening is None else [reasoning.opening]
        self._opening_mask = self._pack(opening)
        self._gap_mask = self._pack(reasoning.gap)
        self._alternatives_mask = self._pack(alternatives) & self._reasoning_mask

    @property
    def param(self) -> str:
        """The request's parameter at fault if no token can come next."""
        return self._matcher.param

    @property
    def error(self) -> str | None:
        """Why the grammar cannot be followed any further; None while it can."""
        return self._matcher.error

    @property
    def is_complete(self) -> bool:
        """Whether the grammar is at its end, and nothing can follow."""
        return self._grammar_start is not None and not self._is_alternative and self._matcher.is_complete

    def fork(self) -> DelayedMatcher:
        """Another matcher that stands where this one does."""
        fork = copy.copy(self)
        fork._matcher, fork._tracker = self._matcher.fork(), copy.copy(self._tracker)
        return fork

    def follow(self, output_token_ids: Sequence[int]) -> None:
        """Takes in the tokens generated since the last call."""
        self._num_followed = len(output_token_ids)
        if self._grammar_start is None:
            self._tracker.follow(output_token_ids)
            end = self._tracker.num_tokens
            if not self._tracker.in_reasoning and end < self._num_followed:
                has_gap = end > 0 and output_token_ids[end] in self._gap_tokens
                self._grammar_start = end + has_gap
        if self._grammar_start is not None and self._grammar_start < self._num_followed:
            self._is_alternative = output_token_ids[self._grammar_start] in self._alternatives
            if not self._is_alternative:
                self._matcher.follow(output_token_ids[self._grammar_start :])

    def token_mask(self) -> np.ndarray:
        """Which tokens may come next, int32 [ceil(V / 32)] as `Matcher.token_mask`."""
        if self._tracker.in_reasoning:
            return self._reasoning_mask
        if self._is_alternative:
            return self._all_tokens
        mask = self._matcher.token_mask()
        if self._grammar_start is None:
            mask = mask | (self._gap_mask if self._num_followed else self._opening_mask)
        if self._grammar_start in (None, self._num_followed):
            mask = mask | self._alternatives_mask
        return mask

    def _pack(self, token_ids: Collection[int]) -> np.ndarray:
        return pack_token_ids(token_ids, 32 * len(self._all_tokens))
