"""The model as requests see it, whichever engine runs it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from jaxis.parsing.parser_detection import detect_parsers
from jaxis.parsing.reasoning_parsers import ReasoningParser, get_reasoning_parser
from jaxis.parsing.tool_parsers import ToolParser, get_tool_parser
from jaxis.sampling_params import SamplingParams
from jaxis.server.http.errors import ModelNotFoundError
from jaxis.tokenizer import Tokenizer

if TYPE_CHECKING:
    from jaxis.engine.grammar.compiler import GrammarCompiler

# What may stand for the name of a parser.
AUTO, NONE = "auto", "none"


def check_parser_names(tool_parser: str, reasoning_parser: str) -> None:
    """Raises ConfigError if there is no such parser: now, and not after a minute of loading."""
    if tool_parser not in (AUTO, NONE):
        get_tool_parser(tool_parser)
    if reasoning_parser not in (AUTO, NONE):
        get_reasoning_parser(reasoning_parser)


@dataclass(frozen=True, kw_only=True)
class ServedModel:
    """What reading a request and writing its answer needs of the model.

    Attributes:
      names: The names under which requests may ask for it; answers carry the first.
      tokenizer: None reads and writes token ids only.
      default_sampling_params: For what a request leaves out.
      grammar_compiler: The engine's, for the forms of answers.
      tool_parser: Of the model's tool calls; None leaves them in the text.
      tool_format_known: False where `AUTO` found no format of tool calls.
      reasoning_parser: Of the model's reasoning; None leaves it in the text.
    """

    names: tuple[str, ...]
    tokenizer: Tokenizer | None
    default_sampling_params: SamplingParams
    grammar_compiler: GrammarCompiler
    tool_parser: type[ToolParser] | None = None
    tool_format_known: bool = True
    reasoning_parser: type[ReasoningParser] | None = None

    @classmethod
    def of(
        cls,
        names: Sequence[str],
        tokenizer: Tokenizer | None,
        default_sampling_params: SamplingParams,
        grammar_compiler: GrammarCompiler,
        *,
        model_type: str | None = None,
        tool_parser: str = AUTO,
        reasoning_parser: str = AUTO,
    ) -> ServedModel:
        """A model with parsers by name: `AUTO` looks for the formats in the chat template, `NONE` leaves texts alone.

        Raises:
          ConfigError: There is no such parser.
        """
        template = "\n".join(tokenizer.chat_templates.values()) if tokenizer else None
        found = detect_parsers(template, model_type)
        tool = {AUTO: found[0], NONE: None}.get(tool_parser, tool_parser)
        reasoning = {AUTO: found[1], NONE: None}.get(reasoning_parser, reasoning_parser)
        return cls(
            names=tuple(names),
            tokenizer=tokenizer,
            default_sampling_params=default_sampling_params,
            grammar_compiler=grammar_compiler,
            tool_parser=get_tool_parser(tool) if tool else None,
            tool_format_known=tool is not None or tool_parser == NONE,
            reasoning_parser=get_reasoning_parser(reasoning) if reasoning else None,
        )

    @property
    def name(self) -> str:
        """The name that answers carry."""
        return self.names[0]

    def check_name(self, name: str | None) -> None:
        """Raises ModelNotFoundError if a request asks for another model."""
        if name is not None and name not in self.names:
            raise ModelNotFoundError(f"the model {name[:200]!r} is not served here; there is: {', '.join(self.names)}")
