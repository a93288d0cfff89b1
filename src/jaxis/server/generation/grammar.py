"""What an answer must match, and which tokens may precede that: its reasoning."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from jaxis.errors import RequestError
from jaxis.parsing.reasoning_parsers.base import ReasoningMarks, ReasoningParser
from jaxis.parsing.tool_parsers.call_grammar import escape_source, literal
from jaxis.parsing.tool_parsers.tools import FunctionTool
from jaxis.structured_outputs import StructuredOutputs
from jaxis.tokenizer import Tokenizer

if TYPE_CHECKING:
    from jaxis.engine.grammar.compiler import CompiledGrammar, GrammarCompiler


@dataclass(frozen=True)
class AnswerGrammar:
    """What an answer must match.

    Attributes:
      field: The request's field that says so, such as "response_format.json_schema.schema".
      structured_outputs: The constraint that it specifies.
      holds_reasoning: Whether it applies from the first token on, to reasoning too.
      holds_calls: Whether it says how tools are called.
      tools: Those tools.
    """

    field: str
    structured_outputs: StructuredOutputs
    holds_reasoning: bool = False
    holds_calls: bool = False
    tools: Sequence[FunctionTool] = ()

    @classmethod
    def of(
        cls,
        field: str,
        *,
        holds_reasoning: bool = False,
        holds_calls: bool = False,
        tools: Sequence[FunctionTool] = (),
        **constraint: Any,
    ) -> AnswerGrammar:
        """Builds one from arguments of StructuredOutputs.

        Raises:
          RequestError: The arguments are invalid.
        """
        try:
            return cls(field, StructuredOutputs(**constraint), holds_reasoning, holds_calls, tools)
        except RequestError as error:
            raise error.about(field) from None

    def compile(self, compiler: GrammarCompiler) -> CompiledGrammar:
        """Compiles the grammar, which may take seconds.

        Raises:
          RequestError: It cannot be honoured.
        """
        try:
            return compiler.compile(self.structured_outputs)
        except RequestError as error:
            self._check_tools(compiler)
            raise self.own(error) from None

    def _check_tools(self, compiler: GrammarCompiler) -> None:
        """Raises RequestError that names a tool of whose parameters no grammar can be made."""
        for tool in self.tools:
            try:
                compiler.compile(StructuredOutputs(json_schema=dict(tool.parameters)))
            except RequestError as error:
                space = "" if error.message.startswith((":", ".")) else " "
                message = f"of {tool.name!r}{space}{error.message}"
                raise RequestError(message, param=f"{tool.place}.parameters") from None

    def expression(self) -> str | None:
        """What it is inside of another grammar; None if it can stand only for itself."""
        spec = self.structured_outputs
        match spec.kind:
            case "json_schema":
                return f"%json {escape_source(spec.source)}"
            case "json_object":
                return '%json {"type": "object"}'
            case "choice":
                return f"({' | '.join(map(literal, json.loads(spec.source)))})"
        return None

    def own(self, error: RequestError) -> RequestError:
        """An error about the constraint as one about the request's field; others as they are."""
        is_constraint = error.param is not None and error.param.partition(".")[0] == "structured_outputs"
        return error.about(self.field) if is_constraint else error


def marks_before_answer(
    parser: type[ReasoningParser] | None, prompt: str, tokenizer: Tokenizer | None
) -> ReasoningMarks | None:
    """How that is marked which may come before what a grammar applies to: the reasoning.

    Words that open the reasoning are also words with which an answer begins. Where a grammar forbids those, they are
    taken for an opening only if the prompt asks for them.

    Args:
      parser: Parses the model's reasoning.
      prompt: As rendered; a template may have opened the reasoning, or closed it.
      tokenizer: The model's.

    Returns:
      None if there is no reasoning: a grammar then applies from the first token.
    """
    marks = None if parser is None or tokenizer is None else parser.marks_before_answer(prompt)
    if marks is None or tokenizer is None or marks.opened:
        return marks
    kept = [
        (opening, end)
        for opening, end in zip(marks.openings, marks.ends, strict=True)
        if opening in prompt or _begins_with_token(opening, tokenizer)
    ]
    if not kept:
        return None
    openings, ends = zip(*kept, strict=True)
    return dataclasses.replace(marks, openings=openings, ends=ends)


def _begins_with_token(opening: str, tokenizer: Tokenizer) -> bool:
    """Whether a mark is a token of its own, or begins with a special one."""
    if tokenizer.token_to_id(opening) is not None:
        return True
    return tokenizer.encode(opening, add_special_tokens=False)[0] in tokenizer.special_token_ids
