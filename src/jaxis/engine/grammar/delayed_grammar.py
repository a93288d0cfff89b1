"""A form that begins after the model's reasoning, and may give way to a tool call."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from jaxis.engine.execution.request_sampling import pack_token_ids
from jaxis.engine.grammar.compiler import CompiledGrammar, GrammarMatcher


@dataclass(frozen=True)
class ReasoningTokens:
    """How reasoning stands in a completion.

    Attributes:
      opened: The completion begins inside it.
      opening: If it is not opened: the token that opens it, as the first one; None if there is no reasoning then.
      closings: Sequences of tokens, each of which ends it.
      gap: Tokens of white space, one of which may stand between reasoning and form.
    """

    opened: bool
    opening: int | None
    closings: Sequence[Sequence[int]]
    gap: Collection[int] = ()


class ReasoningTracker:
    """Where one completion's reasoning ends.

    Attributes:
      in_reasoning: The newest token is a part of it.
      num_tokens: How many tokens it has so far, with those that open and close it.
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
    """A compiled form that holds for what follows the reasoning, or gives way to something else.

    Args:
      grammar: The form.
      reasoning: How to tell what comes before it; None if nothing does.
      alternatives: Tokens that may come in place of the form's first one; what follows them is free.
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


Grammar = CompiledGrammar | DelayedGrammar


class DelayedMatcher:
    """Where one completion stands: in its reasoning, or in its form. Used as `GrammarMatcher` is.

    A completion cannot end in its reasoning, but at its longest.
    """

    def __init__(self, form: GrammarMatcher, reasoning: ReasoningTokens, alternatives: Collection[int]) -> None:
        self._form = form
        self._tracker = ReasoningTracker(reasoning)
        self._gap_tokens = reasoning.gap
        self._alternatives = alternatives
        self._num_followed = 0
        self._form_begins: int | None = None  # at this token; None while it has not begun
        self._is_alternative = False
        self._any = form.vocabulary_mask
        self._reasoning_mask = self._any & ~form.end_mask
        opening = [] if reasoning.opening is None else [reasoning.opening]
        self._opening_mask = self._pack(opening)
        self._gap_mask = self._pack(reasoning.gap)
        self._alternatives_mask = self._pack(alternatives) & self._reasoning_mask

    @property
    def error(self) -> str | None:
        """Why the form cannot be followed any further; None while it can."""
        return self._form.error

    @property
    def is_complete(self) -> bool:
        """Whether the form is at its end, and nothing can follow."""
        return self._form_begins is not None and not self._is_alternative and self._form.is_complete

    def follow(self, output_token_ids: Sequence[int]) -> None:
        """Takes in the tokens generated since the last call."""
        self._num_followed = len(output_token_ids)
        if self._form_begins is None:
            self._tracker.follow(output_token_ids)
            end = self._tracker.num_tokens
            if not self._tracker.in_reasoning and end < self._num_followed:
                has_gap = end > 0 and output_token_ids[end] in self._gap_tokens
                self._form_begins = end + has_gap
        if self._form_begins is not None and self._form_begins < self._num_followed:
            self._is_alternative = output_token_ids[self._form_begins] in self._alternatives
            if not self._is_alternative:
                self._form.follow(output_token_ids[self._form_begins :])

    def token_mask(self) -> np.ndarray:
        """Which tokens may come next, int32 [ceil(V / 32)] as `GrammarMatcher.token_mask`."""
        if self._tracker.in_reasoning:
            return self._reasoning_mask
        if self._is_alternative:
            return self._any
        mask = self._form.token_mask()
        if self._form_begins is None:
            mask = mask | (self._gap_mask if self._num_followed else self._opening_mask)
        if self._form_begins in (None, self._num_followed):
            mask = mask | self._alternatives_mask
        return mask

    def _pack(self, token_ids: Collection[int]) -> np.ndarray:
        return pack_token_ids(token_ids, 32 * len(self._any))
