"""Format of an answer's text: tool calls as the request allows them, reasoning, and a grammar."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxis.errors import RequestError
from jaxis.parsing.reasoning_parsers.base import ReasoningParser
from jaxis.parsing.tool_choice import ToolPlan, calls_grammar, plan_tools
from jaxis.parsing.tool_parsers.base import ToolParser
from jaxis.parsing.tool_parsers.call_grammar import UnwritableCallError
from jaxis.parsing.tool_parsers.tools import FunctionTool, checked_functions
from jaxis.server.generation.grammar import AnswerGrammar
from jaxis.server.generation.served_model import ServedModel
from jaxis.tokenizer import Tokenizer


class ToolsNotSupportedError(RequestError):
    """The request has tools, but the model cannot call tools, or its call format is not known."""

    def __init__(self, message: str, model: str) -> None:
        super().__init__(message, param="tools")
        self.model = model


@dataclass(frozen=True)
class ToolUse:
    """Rules for an answer's tool calls.

    Attributes:
      tools: Tools that the answer may call.
      parser: Parser of the calls in its text; None if no calls are parsed.
      grammar: Grammar of the whole answer, if it must call a tool or if calls must match their schemas.
      call_tokens: Tokens that only ever begin a call; empty if calls begin as ordinary text does.
      parallel: True if calls after the first one count.
      must_call: True if the answer must call a tool.
      write_grammar: Writes the grammar of answers that either call in the model's own format or match this expression
        (None: any text); raises UnwritableCallError. None if the model's format is not known.
    """

    tools: Sequence[FunctionTool] = ()
    parser: type[ToolParser] | None = None
    grammar: AnswerGrammar | None = None
    call_tokens: Sequence[int] = ()
    parallel: bool = True
    must_call: bool = False
    write_grammar: Callable[[str | None], str] | None = None

    def or_answer(self, answer: AnswerGrammar) -> AnswerGrammar:
        """Returns the grammar of answers that either call in the model's own format or match `answer`.

        Raises RequestError if no such grammar can be written.
        """
        expression = answer.expression()
        if expression is not None and self.write_grammar is not None and self.parser is not None:
            with contextlib.suppress(UnwritableCallError):
                source = self.write_grammar(expression)
                holds_reasoning = self.parser.writes_reasoning
                return AnswerGrammar.of(
                    answer.field,
                    grammar=source,
                    holds_reasoning=holds_reasoning,
                    holds_calls=True,
                    tools=self.tools,
                )
        raise RequestError(
            "cannot be joined with this model's tool calls in one grammar: leave it out, or allow no calls",
            param=answer.field,
        )


NO_TOOLS = ToolUse()


@dataclass(frozen=True)
class AnswerFormat:
    """Format and constraints of an answer's text.

    Attributes:
      reasoning_parser: Parser of its reasoning; None leaves the reasoning in the text.
      grammar: Grammar of the text after any reasoning, unless the answer calls tools; None if any text is allowed.
      include_reasoning: True if the client wants the reasoning.
    """

    tools: ToolUse = NO_TOOLS
    reasoning_parser: type[ReasoningParser] | None = None
    grammar: AnswerGrammar | None = None
    include_reasoning: bool = True

    @classmethod
    def of_chat(
        cls, model: ServedModel, tools: ToolUse, grammar: AnswerGrammar | None, *, include_reasoning: bool = True
    ) -> AnswerFormat:
        """Returns the format of an answer to a conversation, which must match `grammar` if the request sends one.

        Raises RequestError if the grammar and the tools contradict each other.
        """
        if grammar is not None and tools.must_call:
            raise RequestError(
                "leaves no room for the call that tool_choice demands: send only one", param=grammar.field
            )
        if grammar is not None and tools.tools and (tools.grammar is not None or not tools.call_tokens):
            grammar = tools.or_answer(grammar)
        return cls(tools, model.parsers.reasoning, grammar or tools.grammar, include_reasoning)

    @property
    def is_parsed(self) -> bool:
        return self.tools.parser is not None or self.reasoning_parser is not None

    @property
    def needs_special_tokens(self) -> bool:
        """True if the text must be decoded with special tokens."""
        return any(
            parser is not None and parser.needs_special_tokens for parser in (self.tools.parser, self.reasoning_parser)
        )


def choose_tools(
    model: ServedModel,
    functions: Mapping[str, Mapping[str, Any]],
    choice: str | Mapping[str, Any] | None,
    *,
    parallel: bool = True,
) -> ToolUse:
    """Returns the rules for an answer that may call the functions of a request.

    Functions by name and the choice have the forms of `checked_functions` and `plan_tools`. With `parallel`, an answer
    may contain more than one call. Raises RequestError if a function is invalid, or the model does not support the
    choice.
    """
    plan = plan_tools(checked_functions(functions), choice, parallel_tool_calls=parallel)
    if plan.mode == "none":
        return ToolUse(parallel=parallel)
    if model.tokenizer and not any("tools" in template for template in model.tokenizer.chat_templates.values()):
        raise ToolsNotSupportedError(
            "are not supported by this model: its chat template has no place for them", model.name
        )
    if plan.mode == "auto" and not model.parsers.tool_format_known:
        raise ToolsNotSupportedError(
            "need the format of the model's calls, and its chat template has none that is known: start with "
            "--tool-call-parser, demand a call, or leave the tools out",
            model.name,
        )
    parser, must_call = model.parsers.tool, plan.json_schema is not None
    write_grammar = write_calls = None
    if parser is not None and model.tokenizer is not None:
        write_calls = functools.partial(_write_grammar, parser, plan, model.tokenizer, must_call)
        write_grammar = functools.partial(write_calls, plan.callable_tools)
    grammar = None
    if write_calls is not None and (must_call or model.always_strict or any(tool.strict for tool in plan.tools)):
        try:
            source = write_calls(plan.callable_tools, None)
        except UnwritableCallError as error:
            if not must_call:
                raise _not_strict(plan.callable_tools, write_calls, error, always_strict=model.always_strict) from None
        else:
            holds_reasoning = parser is not None and parser.writes_reasoning
            grammar = AnswerGrammar.of(
                "tools",
                grammar=source,
                holds_reasoning=holds_reasoning,
                holds_calls=True,
                tools=plan.callable_tools,
            )
    if grammar is None and plan.json_schema is not None:
        parser, write_grammar = plan.parser, None
        schema = dict(plan.json_schema)
        grammar = AnswerGrammar.of("tools", json_schema=schema, holds_calls=True, tools=plan.callable_tools)
    call_tokens = _call_tokens(parser, model.tokenizer)
    return ToolUse(plan.tools, parser, grammar, call_tokens, parallel, must_call, write_grammar)


def _write_grammar(
    parser: type[ToolParser],
    plan: ToolPlan,
    tokenizer: Tokenizer,
    must_call: bool,
    tools: Sequence[FunctionTool],
    answer: str | None,
) -> str:
    return calls_grammar(parser, tools, tokenizer, must_call=must_call, max_calls=plan.max_calls, answer=answer)


def _not_strict(
    tools: Sequence[FunctionTool],
    write_calls: Callable[[Sequence[FunctionTool], None], str],
    error: UnwritableCallError,
    *,
    always_strict: bool,
) -> RequestError:
    """Returns an error about the first tool whose calls have no grammar; about all if there is none alone."""
    advice = "start without --tool-strictness always" if always_strict else "leave strict out"
    which, param = "", "tools"
    for tool in tools:
        try:
            write_calls([tool], None)
        except UnwritableCallError as own:
            which, param, error = f"of {tool.name!r} ", f"{tool.place}.parameters", own
            break
    return RequestError(
        f"{which}cannot be strict: this model's calls cannot be held to {error}: change the schema, or {advice}",
        param=param,
    )


def _call_tokens(parser: type[ToolParser] | None, tokenizer: Tokenizer | None) -> list[int]:
    if parser is None or tokenizer is None:
        return []
    ids = (tokenizer.token_to_id(marker) for marker in parser.call_markers)
    return [token_id for token_id in ids if token_id is not None]
