"""A grammar that applies after the model's reasoning, and that a tool call may replace."""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator, Sequence

import numpy as np

from jaxis.engine.grammar.compiler import CompiledGrammar, GrammarMatcher
from jaxis.engine.grammar.mark_tracker import MarkTracker
from jaxis.engine.grammar.matcher import Matcher
from jaxis.engine.grammar.token_mask import is_allowed, pack_token_ids
from jaxis.engine.grammar.token_prefixes import token_prefixes
from jaxis.parsing.reasoning_parsers.base import ReasoningMarks
from jaxis.tokenizer import Tokenizer

_GAPS = ("\n\n", "\n", " ")


class DelayedGrammar:
    """A compiled grammar for the text after the reasoning, unless an alternative begins there.

    Args:
      grammar: The grammar.
      tokenizer: The model's tokenizer.
      marks: Marks around the text before the grammar; None if there is no such text.
      alternatives: Tokens that may replace the grammar's first one; the tokens after them are unconstrained.
    """

    def __init__(
        self,
        grammar: CompiledGrammar,
        tokenizer: Tokenizer,
        marks: ReasoningMarks | None,
        alternatives: Collection[int] = (),
    ) -> None:
        self._grammar = grammar
        self.marks = marks
        self.alternatives = frozenset(alternatives)
        self._tokens = None if marks is None else MarkTokens(marks, tokenizer)

    def new_matcher(self, stop_token_ids: Collection[int] = ()) -> DelayedMatcher:
        return DelayedMatcher(self._grammar.new_matcher(stop_token_ids), self._tokens, self.alternatives)


class MarkTokens:
    """Tokens that may spell the marks around the text before a grammar.

    Attributes:
      gap: Tokens of white space or of markers, one of which may come between that text and the grammar.
      interruptions: Tokens that end the text and belong to what follows.
      unfit: Tokens that would end the text and also hold the beginning of what follows.
    """

    def __init__(self, marks: ReasoningMarks, tokenizer: Tokenizer) -> None:
        self.marks = marks
        gaps = [tokenizer.encode(text, add_special_tokens=False) for text in (*_GAPS, *marks.answer_openings)]
        self.gap = frozenset(ids[0] for ids in gaps if len(ids) == 1)
        self.interruptions = frozenset(
            token_id for mark in marks.interruptions if (token_id := tokenizer.token_to_id(mark)) is not None
        )
        self._tokenizer = tokenizer
        self._prefixes = token_prefixes(tokenizer)
        self._closings = [mark.encode() for mark in marks.closings]
        self._opening_ids = {mark.encode(): tokenizer.token_to_id(mark) for mark in marks.openings}
        self.unfit = frozenset(i for closing in self._closings for i in self._prefixes.beyond_inner(closing))

    def new_tracker(self) -> MarkTracker:
        """Returns a tracker that follows one completion from its start."""
        return MarkTracker(self.marks, self._tokenizer)

    def opening(self, text: bytes) -> Iterator[int]:
        """Yields the tokens that bring a completion of this text nearer to an opening, as the model writes it."""
        for mark, token_id in self._opening_ids.items():
            if token_id is not None:
                yield from () if text else (token_id,)
            elif mark.startswith(text):
                yield from self._prefixes.toward(mark[len(text) :])

    def unfit_after(self, text: bytes) -> Iterator[int]:
        """Yields the tokens that are like `unfit` after this text."""
        for closing in self._closings:
            for length in range(1, len(closing)):
                if text.endswith(closing[:length]):
                    yield from self._prefixes.beyond(closing[length:])


class DelayedMatcher(Matcher):
    """Position of one completion: before its grammar, or in it. A `Matcher`.

    Within its reasoning, a completion can end only by reaching its maximum length.
    """

    def __init__(self, matcher: GrammarMatcher, tokens: MarkTokens | None, alternatives: Collection[int]) -> None:
        self._matcher = matcher
        self._tokens = tokens
        self._tracker = None if tokens is None else tokens.new_tracker()
        self._alternatives = alternatives
        self._num_followed = 0
        self._grammar_start = None if tokens else 0  # the first token that it applies to; None while unknown
        self._is_alternative = False
        # For text that may be the beginning of what opens the reasoning, or that of the grammar.
        self._early = None if tokens is None or tokens.marks.opened else matcher.fork()
        self._all_tokens = matcher.vocabulary_mask
        without_end = self._all_tokens & ~matcher.end_mask
        self._alternatives_mask = self._pack(alternatives) & without_end
        first_mask = matcher.token_mask() | self._alternatives_mask
        interruptions, unfit = (frozenset(), frozenset()) if tokens is None else (tokens.interruptions, tokens.unfit)
        self._fit_mask = ~self._pack(unfit)
        self._reasoning_mask = without_end & self._fit_mask & ~(self._pack(interruptions) & ~first_mask)

    @property
    def param(self) -> str:
        return self._matcher.param

    @property
    def error(self) -> str | None:
        return self._matcher.error

    @property
    def is_complete(self) -> bool:
        """True if the grammar is at its end: only a token that ends the completion can follow."""
        return self._grammar_start is not None and not self._is_alternative and self._matcher.is_complete

    def fork(self) -> DelayedMatcher:
        fork = copy.copy(self)
        fork._matcher, fork._tracker = self._matcher.fork(), copy.copy(self._tracker)
        fork._early = None if self._early is None else self._early.fork()
        return fork

    def follow(self, output_token_ids: Sequence[int]) -> None:
        if self._grammar_start is None:
            self._find_start(output_token_ids)
        self._num_followed = len(output_token_ids)
        if self._grammar_start is not None and self._grammar_start < self._num_followed:
            self._is_alternative = output_token_ids[self._grammar_start] in self._alternatives
            if not self._is_alternative:
                self._matcher.follow(output_token_ids[self._grammar_start :])

    def _find_start(self, token_ids: Sequence[int]) -> None:
        tokens, tracker = self._tokens, self._tracker
        assert tokens is not None
        assert tracker is not None
        tracker.follow(token_ids)
        if tracker.end is not None:
            self._grammar_start = self._start_after(tracker.end, token_ids, tokens, tracker)
        elif tracker.is_over:
            self._grammar_start = 0
        elif not tracker.in_reasoning and self._early is not None:
            for count in range(self._num_followed, len(token_ids)):
                if not is_allowed(self._early.token_mask(), token_ids[count]):
                    self._early = None
                    return
                self._early.follow(token_ids[: count + 1])

    def _start_after(self, end: int, token_ids: Sequence[int], tokens: MarkTokens, tracker: MarkTracker) -> int | None:
        """Returns where the grammar begins if the text before it has ended; None if only the next token shows it."""
        if token_ids[end - 1] in tokens.interruptions:
            return end - 1
        if tracker.rest:
            return end
        return None if end == len(token_ids) else end + (token_ids[end] in tokens.gap)

    def token_mask(self) -> np.ndarray:
        if self._is_alternative:
            return self._all_tokens
        if self._grammar_start is not None:
            mask = self._matcher.token_mask()
            return mask | self._alternatives_mask if self._grammar_start == self._num_followed else mask
        tokens, tracker = self._tokens, self._tracker
        assert tokens is not None
        assert tracker is not None
        if tracker.end is not None:
            return self._matcher.token_mask() | self._alternatives_mask | self._pack(tokens.gap)
        if tracker.in_reasoning:
            unfit = list(tokens.unfit_after(tracker.text))
            return self._reasoning_mask & ~self._pack(unfit) if unfit else self._reasoning_mask
        mask = self._pack(list(tokens.opening(tracker.text))) & self._fit_mask
        if self._early is not None:
            mask = mask | self._early.token_mask()
        return mask if self._num_followed else mask | self._alternatives_mask

    def _pack(self, token_ids: Collection[int]) -> np.ndarray:
        return pack_token_ids(token_ids, 32 * len(self._all_tokens))
