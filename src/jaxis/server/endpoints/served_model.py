"""The model as requests see it, whichever engine runs it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from jaxis.parsing.model_parsers import ModelParsers
from jaxis.sampling_params import SamplingParams
from jaxis.server.http.errors import ModelNotFoundError
from jaxis.tokenizer import Tokenizer

if TYPE_CHECKING:
    from jaxis.engine.grammar.compiler import GrammarCompiler


@dataclass(frozen=True, kw_only=True)
class ServedModel:
    """What is needed of the model to read a request and write its answer.

    Attributes:
      names: The names under which requests may ask for it; answers carry the first.
      tokenizer: None reads and writes token ids only.
      default_sampling_params: For what a request leaves out.
      grammar_compiler: The engine's, for structured outputs.
      parsers: How the model writes tool calls and reasoning.
      fingerprint: The engine's, which answers carry; None if there is none.
    """

    names: tuple[str, ...]
    tokenizer: Tokenizer | None
    default_sampling_params: SamplingParams
    grammar_compiler: GrammarCompiler
    parsers: ModelParsers = field(default_factory=ModelParsers)
    fingerprint: str | None = None

    @property
    def name(self) -> str:
        """The name that answers carry."""
        return self.names[0]

    def check_name(self, name: str | None) -> None:
        """Raises ModelNotFoundError if a request asks for another model."""
        if name is not None and name not in self.names:
            raise ModelNotFoundError(f"the model {name[:200]!r} is not served here; available: {', '.join(self.names)}")
