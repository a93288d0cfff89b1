"""From an answer's text to a message with its tool calls and reasoning."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from jaxis.inference.conversation import Message, Role
from jaxis.outputs import RequestOutput
from jaxis.parsing.output_parser import OutputParser
from jaxis.parsing.parser_detection import detect_parsers
from jaxis.parsing.reasoning_parsers import ReasoningParser, get_reasoning_parser
from jaxis.parsing.tool_parsers import ToolParser, get_tool_parser
from jaxis.parsing.tool_parsers.tools import function_tools
from jaxis.server.endpoints.chat_output import ChatOutput, message_of

if TYPE_CHECKING:
    from jaxis.inference.engine import JAXInferenceEngine

AUTO = "auto"
# Made here, where the model writes none.
_MADE_ID = re.compile(r"call_[0-9a-f]{24}")


@dataclass(frozen=True)
class AnswerParsing:
    """How a model writes its tool calls and its reasoning.

    Attributes:
      tool_parser: None leaves calls in the text.
      reasoning_parser: None leaves reasoning in the text.
    """

    tool_parser: type[ToolParser] | None
    reasoning_parser: type[ReasoningParser] | None

    @classmethod
    def of(cls, engine: JAXInferenceEngine, *, has_form: bool = False) -> AnswerParsing:
        """An engine's, by its model.tool_call_parser.

        Args:
          engine: The engine.
          has_form: The text is of a given form from its beginning, and has no reasoning.

        Raises:
          ConfigError: There is no such parser.
        """
        tokenizer, asked = engine.llm.tokenizer, engine.model_params.tool_call_parser
        template = "\n".join(tokenizer.chat_templates.values()) if tokenizer else None
        model_type = engine.llm.engine.vllm_config.model_config.hf_config.get("model_type")
        tool, reasoning = detect_parsers(template, model_type)
        tool = tool if asked == AUTO else asked
        return cls(
            get_tool_parser(tool) if tool else None,
            get_reasoning_parser(reasoning) if reasoning and not has_form else None,
        )

    @property
    def needs_special_tokens(self) -> bool:
        """Whether the text must have its special tokens."""
        parsers = (self.tool_parser, self.reasoning_parser)
        return any(parser is not None and parser.needs_special_tokens for parser in parsers)

    def parse(
        self, output: RequestOutput, tools: Sequence[Mapping[str, Any]] | None, row_id: str
    ) -> tuple[Message, str | None]:
        """The message of an output with one completion, and its finish reason.

        Args:
          output: The whole output.
          tools: That were offered; without any, calls stay in the text.
          row_id: Of the row, from which calls get ids that are the same each time.
        """
        [completion] = output.outputs
        parser = OutputParser(
            self.tool_parser if tools else None,
            self.reasoning_parser,
            tools=function_tools(tools or ()),
            prompt=output.prompt or "",
        )
        reader = ChatOutput(parser)
        parsed = message_of(reader.read(completion))
        calls = [call.model_dump(exclude={"index"}) for call in parsed.tool_calls or ()]
        for number, call in enumerate(calls):
            if _MADE_ID.fullmatch(call["id"]):
                call["id"] = f"call_{hashlib.sha256(f'{row_id}:{number}'.encode()).hexdigest()[:24]}"
        message = Message(
            Role.ASSISTANT, parsed.content, tool_calls=calls or None, reasoning_content=parsed.reasoning_content
        )
        return message, reader.finish_reason(completion)
