from __future__ import annotations

import uuid
from typing import Any

from jaxis.errors import RequestError
from jaxis.server.anthropic.message_blocks import InlineTool, ToolAdditionBlock, ToolDefinition
from jaxis.server.anthropic.message_schema import (
    AnyChoice,
    CountTokensRequest,
    MessagesRequest,
    NamedChoice,
    NoChoice,
    ThinkingOff,
    ThinkingOn,
)
from jaxis.server.anthropic.message_turns import system_text, template_messages, template_tool
from jaxis.server.generation.answer_format import AnswerFormat, choose_tools
from jaxis.server.generation.effort import effort_budget
from jaxis.server.generation.grammar import AnswerGrammar
from jaxis.server.generation.job import GenerationJob, make_job
from jaxis.server.generation.prompts import ChatPrompt, template_sources, thinking_variables
from jaxis.server.generation.served_model import ServedModel

_USUAL_EFFORTS = ("low", "medium", "high")


def message_job(request: CountTokensRequest, model: ServedModel) -> GenerationJob:
    """Returns the job of a request of /v1/messages. To count tokens, only the job's prompt matters.

    Raises RequestError if a field cannot be honoured.
    """
    model = model.named(request.model)
    offered = _offered_tools(request)
    messages = template_messages(request.messages, {tool.name: tool for tool in offered.values()}, model)
    if system := system_text(request.system):
        messages.insert(0, {"role": "system", "content": system})
    if not messages:
        raise RequestError("has nothing to answer but blocks that have no effect: add text", param="messages")
    goes_on = messages[-1]["role"] == "assistant"
    if goes_on and request.thinking is not None and not isinstance(request.thinking, ThinkingOff):
        raise RequestError(
            "ends with the assistant's turn, which leaves no place for thinking: disable thinking", param="messages"
        )
    choice = request.tool_choice
    functions = {place: template_tool(tool) for place, tool in offered.items()}
    tools = choose_tools(
        model,
        {place: {**tool["function"], "strict": offered[place].strict} for place, tool in functions.items()},
        _openai_choice(choice),
        parallel=choice is None or isinstance(choice, NoChoice) or not choice.disable_parallel_tool_use,
    )
    shown = () if isinstance(choice, NoChoice) else functions.items()
    prompt = ChatPrompt(
        messages=messages,
        # The list of tools is at the head of the prompt: a tool added there later would invalidate all cached blocks.
        tools=[tool for place, tool in shown if not offered[place].defer_loading],
        variables=_template_variables(request, model),
        add_generation_prompt=not goes_on,
        continue_final_message=goes_on,
    )
    answer = AnswerFormat.of_chat(
        model, tools, _grammar(request), include_reasoning=not isinstance(request.thinking, ThinkingOff)
    )
    settings = {}
    if isinstance(request, MessagesRequest):
        settings = {
            "max_tokens": max(1, request.max_tokens),
            "stop": request.stop_sequences,
            "temperature": request.temperature,
            "top_p": request.top_p,
            "top_k": request.top_k,
            "thinking_token_budget": _thinking_budget(request, model),
        }
    return make_job(
        f"msg_{uuid.uuid4().hex}",
        model,
        prompt,
        settings,
        answer,
        stream=isinstance(request, MessagesRequest) and bool(request.stream),
    )


def left_out(request: CountTokensRequest, model: ServedModel) -> list[str]:
    """Returns names of ineffective parts of a request: tools that run at Anthropic, unread effort or budget."""
    names = [f"tools.{tool.type}" for tool in request.tools or () if not tool.is_function]
    effort = _effort(request)
    reads_effort = "reasoning_effort" in template_sources(model.tokenizer)
    if isinstance(request.thinking, ThinkingOn) and _thinking_budget(request, model) is None:
        names.append("thinking.budget_tokens")
    has_effect = effort is None or reads_effort or effort_budget(effort, model) is not None
    return names if has_effect else [*names, "output_config.effort"]


def _thinking_budget(request: CountTokensRequest, model: ServedModel) -> int | None:
    if not isinstance(request.thinking, ThinkingOn):
        return effort_budget(_effort(request), model)
    return request.thinking.budget_tokens if model.parsers.reasoning is not None else None


def _effort(request: CountTokensRequest) -> str | None:
    return request.output_config.effort if request.output_config is not None else None


def _offered_tools(request: CountTokensRequest) -> dict[str, ToolDefinition]:
    """Returns the request's functions by place, those defined between its turns last, without Anthropic's own tools."""
    offered = {f"tools[{i}]": tool for i, tool in enumerate(request.tools or ())}
    for i, message in enumerate(request.messages):
        for j, block in enumerate(message.blocks):
            if isinstance(block, ToolAdditionBlock) and isinstance(block.tool, InlineTool):
                tool = block.tool.definition.model_copy(update={"defer_loading": True})
                offered[f"messages[{i}].content[{j}].tool.definition"] = tool
    choice = request.tool_choice
    if isinstance(choice, NamedChoice):
        named = next((tool for tool in offered.values() if tool.name == choice.name), None)
        if named is not None and not named.is_function:
            raise RequestError(
                f"names a tool of type {named.type!r}, which does not run here: leave it out", param="tool_choice"
            )
    return {place: tool for place, tool in offered.items() if tool.is_function}


def _openai_choice(choice: object) -> str | dict[str, Any] | None:
    match choice:
        case AnyChoice():
            return "required"
        case NamedChoice(name=name):
            return {"type": "function", "function": {"name": name}}
        case NoChoice():
            return "none"
    return None


def _grammar(request: CountTokensRequest) -> AnswerGrammar | None:
    given = request.output_config.format if request.output_config is not None else None
    if given is not None and request.output_format is not None:
        raise RequestError("and output_config.format are the same: send only one", param="output_format")
    if given is not None:
        return AnswerGrammar.of("output_config.format.schema", json_schema=given.schema_)
    if request.output_format is not None:
        return AnswerGrammar.of("output_format.schema", json_schema=request.output_format.schema_)
    return None


def _template_variables(request: CountTokensRequest, model: ServedModel) -> dict[str, Any]:
    """Returns variables of the chat template that switch reasoning. Variables that it does not read have no effect."""
    templates = template_sources(model.tokenizer)
    variables: dict[str, Any] = {}
    if isinstance(request.thinking, ThinkingOn | ThinkingOff):
        variables = thinking_variables(isinstance(request.thinking, ThinkingOn), model.tokenizer)
    effort = _effort(request)
    if effort is not None and "reasoning_effort" in templates:
        is_known = effort in _USUAL_EFFORTS or f"'{effort}'" in templates or f'"{effort}"' in templates
        variables["reasoning_effort"] = effort if is_known else _USUAL_EFFORTS[-1]
    return variables
