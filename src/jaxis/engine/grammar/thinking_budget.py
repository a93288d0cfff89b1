"""Thinking budgets: after a number of tokens of reasoning, the model's own closing mark ends it.

A budget is a matcher like that of a grammar: all that it does is in the masks of tokens that may come next. So it is
batched, follows drafts, and combines with a grammar, whose masks it restricts further. A budget with a grace period
also names a token that the sampler takes where it is among the likely ones.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

import numpy as np

from jaxis.engine.grammar.mark_tracker import MarkTracker
from jaxis.engine.grammar.matcher import Matcher
from jaxis.engine.grammar.token_mask import pack_token_ids
from jaxis.errors import RequestError
from jaxis.parsing.reasoning_parsers.base import ReasoningMarks, ReasoningParser
from jaxis.sampling_params import SamplingParams
from jaxis.tokenizer import Tokenizer

if TYPE_CHECKING:
    from jaxis.engine.grammar.compiler import GrammarCompiler
    from jaxis.engine.grammar.matcher import Grammar

_NUM_LAST_TOKENS = 64  # of a prompt: more than any mark of reasoning has


class ThinkingBudget:
    """A budget for one request's completions, and the grammar that they follow too.

    Args:
      marks: Marks of their reasoning.
      num_tokens: Number of tokens that may follow the opening.
      tokenizer: The model's tokenizer.
      vocab_size: V.
      grammar: None if they follow none.
      grace: Number of further tokens before the end of the reasoning is forced. Within them, that end is taken where it
        is among the likely tokens.

    Raises:
      RequestError: The model's tokens do not spell the end of its reasoning.
    """

    def __init__(
        self,
        marks: ReasoningMarks,
        num_tokens: int,
        tokenizer: Tokenizer,
        vocab_size: int,
        grammar: Grammar | None = None,
        *,
        grace: int = 0,
    ) -> None:
        self.marks = marks
        self.num_tokens = num_tokens
        self.grace = grace
        self.grammar = grammar
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._ends = [_end_token_ids(end, marks, tokenizer, vocab_size) for end in marks.ends]

    def new_matcher(self, stop_token_ids: Collection[int] = ()) -> BudgetMatcher:
        refused = None
        if self.marks.refused is not None:
            token_ids = _tokens_toward(self.marks.refused[1], self._tokenizer)
            refused = ~pack_token_ids(token_ids, self._vocab_size)
        return BudgetMatcher(
            None if self.grammar is None else self.grammar.new_matcher(stop_token_ids),
            MarkTracker(self.marks, self._tokenizer),
            self.marks,
            self.num_tokens,
            self.grace,
            self._ends,
            pack_token_ids(range(self._vocab_size), self._vocab_size),
            refused,
        )


class BudgetMatcher(Matcher):
    """Position of one completion in its budget, and in its grammar. A `Matcher`.

    If a grammar does not allow the tokens that the budget demands, the grammar goes first.
    """

    def __init__(
        self,
        matcher: Matcher | None,
        tracker: MarkTracker,
        marks: ReasoningMarks,
        num_tokens: int,
        grace: int,
        ends: Sequence[Sequence[int]],
        all_tokens: np.ndarray,
        refused_mask: np.ndarray | None,
    ) -> None:
        self._matcher, self._tracker = matcher, tracker
        self._num_tokens = num_tokens
        self._grace = grace
        self._ends = ends
        self._before_refused = b"" if marks.refused is None else marks.refused[0].encode()
        self._all_tokens, self._refused_mask = all_tokens, refused_mask
        self._newest: tuple[int, ...] = ()  # tokens, as many as one less than the longest end

    @property
    def param(self) -> str:
        return "thinking_token_budget" if self._matcher is None else self._matcher.param

    @property
    def error(self) -> str | None:
        return None if self._matcher is None else self._matcher.error

    @property
    def is_complete(self) -> bool:
        """True if the grammar is at its end: only a token that ends the completion can follow."""
        return self._matcher is not None and self._matcher.is_complete

    def fork(self) -> BudgetMatcher:
        fork = copy.copy(self)
        fork._tracker = copy.copy(self._tracker)
        fork._matcher = None if self._matcher is None else self._matcher.fork()
        return fork

    def follow(self, output_token_ids: Sequence[int]) -> None:
        if self._matcher is not None:
            self._matcher.follow(output_token_ids)
        self._tracker.follow(output_token_ids)
        self._newest = tuple(output_token_ids[-max(map(len, self._ends)) :])

    def token_mask(self) -> np.ndarray:
        mask = self._all_tokens if self._matcher is None else self._matcher.token_mask()
        allowed = self._allowed()
        if allowed is None:
            return mask
        both = mask & allowed
        return both if both.any() else mask

    def _allowed(self) -> np.ndarray | None:
        """Returns the tokens that the budget allows next; None allows all."""
        tracker = self._tracker
        if tracker.num_thought < self._num_tokens:
            return None
        if tracker.in_reasoning:
            if tracker.num_thought < self._num_tokens + self._grace:
                return None
            return pack_token_ids([self._next_of_end()], 32 * len(self._all_tokens))
        if self._refused_mask is not None and tracker.text.endswith(self._before_refused):
            return self._refused_mask
        return None

    @property
    def may_favor(self) -> bool:
        return self._grace > 0

    def favored_token(self) -> int | None:
        """Returns the next token of the end of the reasoning, once the budget is reached."""
        tracker = self._tracker
        if self._grace and tracker.in_reasoning and tracker.num_thought >= self._num_tokens:
            return self._next_of_end()
        return None

    def _next_of_end(self) -> int:
        """Returns the next token of the end of the reasoning; the newest tokens may be its beginning."""
        end = self._ends[self._tracker.opening]
        longest = min(len(end) - 1, self._tracker.num_thought)
        for length in range(longest, 0, -1):
            if self._newest[-length:] == tuple(end[:length]):
                return end[length]
        return end[0]


def with_thinking_budget(
    grammar: Grammar | None,
    params: SamplingParams,
    parser: type[ReasoningParser] | None,
    prompt: str | None,
    prompt_token_ids: Sequence[int],
    compiler: GrammarCompiler,
) -> Grammar | None:
    """Returns a request's grammar with its thinking budget.

    Args:
      grammar: The grammar; None if there is none.
      params: The request's parameters, which have a budget.
      parser: Parser of the model's reasoning.
      prompt: The rendered prompt; a template may have opened the reasoning, or closed it. None reads it from its
        tokens.
      prompt_token_ids: The prompt.
      compiler: Compiler of the model, which knows its tokens.

    Raises:
      RequestError: The model's reasoning format is unknown.
    """
    num_tokens = params.thinking_token_budget
    assert num_tokens is not None
    if parser is None or compiler.tokenizer is None:
        raise RequestError(
            f"={num_tokens} cannot be honoured: it is not known how the model marks its thinking: leave it out",
            param="thinking_token_budget",
        )
    if prompt is None:
        newest = list(prompt_token_ids[-_NUM_LAST_TOKENS:])
        prompt = compiler.tokenizer.decode(newest, skip_special_tokens=False)
    marks = parser.marks(prompt)
    if marks is None:
        return grammar
    grace = params.thinking_budget_grace_period
    return ThinkingBudget(marks, num_tokens, compiler.tokenizer, compiler.vocab_size, grammar, grace=grace)


def _end_token_ids(end: str, marks: ReasoningMarks, tokenizer: Tokenizer, vocab_size: int) -> list[int]:
    token_id = tokenizer.token_to_id(end)
    token_ids = tokenizer.encode(end, add_special_tokens=False) if token_id is None else [token_id]
    text = b"".join(map(tokenizer.token_bytes, token_ids))
    if max(token_ids, default=vocab_size) >= vocab_size or not any(mark.encode() in text for mark in marks.closings):
        raise RequestError(
            f"cannot be honoured: the model has no tokens for {end!r}, which ends its reasoning: leave it out",
            param="thinking_token_budget",
        )
    return token_ids


@functools.lru_cache(maxsize=4)
def _tokens_toward(word: str, tokenizer: Tokenizer) -> frozenset[int]:
    """Returns the tokens with which text may begin that, after white space, begins with a word."""
    found = set()
    for token_id in range(tokenizer.vocab_size):
        text = tokenizer.token_text(token_id)
        start = text.lstrip()
        if text and (word.startswith(start) or start.startswith(word)):
            found.add(token_id)
    return frozenset(found)
