"""The recipe by which another process makes a request's grammar again, since compiled grammars are not sent."""

from __future__ import annotations

from typing import Self

import msgspec

from jaxis.engine.grammar.compiler import GrammarCompiler
from jaxis.engine.grammar.delayed_grammar import DelayedGrammar
from jaxis.engine.grammar.matcher import Grammar
from jaxis.engine.grammar.thinking_budget import ThinkingBudget
from jaxis.parsing.reasoning_parsers.base import ReasoningMarks
from jaxis.sampling_params import SamplingParams


class GrammarDelay(msgspec.Struct, array_like=True):
    """The text allowed before a grammar, or instead of it, as `DelayedGrammar` defines it."""

    marks: ReasoningMarks | None
    alternatives: list[int]


class GrammarRecipe(msgspec.Struct, array_like=True):
    """All of a grammar that its request's parameters do not say.

    Attributes:
      delay: Text before the grammar of `SamplingParams.structured_outputs`.
      budgeted: Marks of the reasoning that `SamplingParams.thinking_token_budget` limits.
    """

    delay: GrammarDelay | None = None
    budgeted: ReasoningMarks | None = None

    @classmethod
    def of(cls, params: SamplingParams, grammar: Grammar | None) -> Self | None:
        """Returns the recipe of a request's grammar; None if all tokens are allowed everywhere."""
        recipe = cls()
        if isinstance(grammar, ThinkingBudget):
            grammar, recipe.budgeted = grammar.grammar, grammar.marks
        if isinstance(grammar, DelayedGrammar):
            recipe.delay = GrammarDelay(grammar.marks, list(grammar.alternatives))
        return None if params.structured_outputs is None and recipe.budgeted is None else recipe

    def make(self, params: SamplingParams, compiler: GrammarCompiler) -> Grammar | None:
        """Makes the grammar, which may take seconds if there are `structured_outputs`, without a limit on the time."""
        grammar: Grammar | None = None
        budget, tokenizer = params.thinking_token_budget, compiler.tokenizer
        if params.structured_outputs is not None:
            grammar = compiled = compiler.compile(params.structured_outputs, limited=False)
            if self.delay is not None and tokenizer is not None:
                grammar = DelayedGrammar(compiled, tokenizer, self.delay.marks, self.delay.alternatives)
        if self.budgeted is None or budget is None or tokenizer is None:
            return grammar
        grace = params.thinking_budget_grace_period
        return ThinkingBudget(self.budgeted, budget, tokenizer, compiler.vocab_size, grammar, grace=grace)
