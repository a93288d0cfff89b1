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
    """A constraint on an answer, from a field of the request.

    Attributes:
      field: The request's field, such as "response_format.json_schema.schema".
      holds_reasoning: True if the constraint also covers the reasoning, so that it applies from the first token.
      holds_calls: True if the constraint covers tool calls.
      tools: Tools whose calls it covers.
      ignored: Keywords of its schemas that answers are not held to, by their fields; known once it is compiled.
    """

    field: str
    structured_outputs: StructuredOutputs
    holds_reasoning: bool = False
    holds_calls: bool = False
    tools: Sequence[FunctionTool] = ()
    ignored: set[str] = dataclasses.field(default_factory=set, init=False, compare=False)

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
        """Builds a grammar from arguments of StructuredOutputs. Raises RequestError if they are invalid."""
        try:
            return cls(field, StructuredOutputs(**constraint), holds_reasoning, holds_calls, tools)
        except RequestError as error:
            raise error.about(field) from None

    def compile(self, compiler: GrammarCompiler) -> CompiledGrammar:
        """Compiles the grammar, which may take seconds. Raises RequestError if it cannot be honoured."""
        try:
            compiled = compiler.compile(self.structured_outputs)
            self.ignored.update(f"{self.field}.{keyword}" for keyword in compiled.ignored)
            return compiled
        except RequestError as error:
            self._check_tools(compiler)
            raise self.own(error) from None

    def _check_tools(self, compiler: GrammarCompiler) -> None:
        """Raises a RequestError that names the first tool whose parameters cannot be made a grammar."""
        for tool in self.tools:
            try:
                compiler.compile(StructuredOutputs(json_schema=dict(tool.parameters)))
            except RequestError as error:
                space = "" if error.message.startswith((":", ".")) else " "
                message = f"of {tool.name!r}{space}{error.message}"
                raise RequestError(message, param=f"{tool.place}.parameters") from None

    def expression(self) -> str | None:
        """Returns the constraint as an expression within another grammar; None if it cannot be part of one."""
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
        """Returns an error about the constraint as one about the request's field; other errors unchanged."""
        is_constraint = error.param is not None and error.param.partition(".")[0] == "structured_outputs"
        return error.about(self.field) if is_constraint else error


def marks_before_answer(
    parser: type[ReasoningParser] | None, prompt: str, tokenizer: Tokenizer | None
) -> ReasoningMarks | None:
    """Returns the marks of the reasoning that may precede the part of an answer to which a grammar applies.

    None if no reasoning can come: the grammar then applies from the first token. The template may already have opened
    or closed the reasoning in the rendered prompt. Some openings of reasoning are plain words, with which an answer may
    also begin. If the grammar forbids such words, they count as an opening only if the prompt contains them.
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
    if tokenizer.token_to_id(opening) is not None:
        return True
    return tokenizer.encode(opening, add_special_tokens=False)[0] in tokenizer.special_token_ids
