"""The grammar of a request that brings none: all constraints on its tokens, made from its parameters."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING

from jaxis.engine.grammar.compiler import GrammarCompiler
from jaxis.engine.grammar.matcher import Grammar
from jaxis.sampling_params import SamplingParams

if TYPE_CHECKING:
    from jaxis.parsing.model_parsers import ModelParsers


class RequestGrammars:
    """Maker of the grammars of an engine's requests.

    Args:
      compiler: Compiler of the engine.
      model_type: Model type in the model's configuration.
    """

    def __init__(self, compiler: GrammarCompiler, model_type: str | None) -> None:
        self._compiler = compiler
        self._model_type = model_type

    def make(self, params: SamplingParams, prompt: str | None, prompt_token_ids: Sequence[int]) -> Grammar | None:
        """Returns the grammar of a request; None if all tokens are allowed everywhere. This may take seconds.

        Args:
          params: Parameters of the request.
          prompt: The prompt's text, if it is known.
          prompt_token_ids: The prompt.

        Raises:
          RequestError: A parameter is not supported.
        """
        grammar: Grammar | None = None
        if params.structured_outputs is not None:
            grammar = self._compiler.compile(params.structured_outputs)
        if params.thinking_token_budget is None:
            return grammar
        from jaxis.engine.grammar.thinking_budget import with_thinking_budget

        return with_thinking_budget(grammar, params, self._parsers.reasoning, prompt, prompt_token_ids, self._compiler)

    @cached_property
    def _parsers(self) -> ModelParsers:
        from jaxis.parsing.model_parsers import ModelParsers

        return ModelParsers.select(self._compiler.tokenizer, self._model_type)
