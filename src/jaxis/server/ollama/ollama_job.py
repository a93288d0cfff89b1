from __future__ import annotations

import functools
import json
import logging
from collections.abc import Sequence
from typing import Any

from jaxis.errors import RequestError
from jaxis.server.generation.answer_format import AnswerFormat, choose_tools
from jaxis.server.generation.effort import effort_budget, effort_variables
from jaxis.server.generation.grammar import AnswerGrammar
from jaxis.server.generation.images import base64_part
from jaxis.server.generation.job import GenerationJob, make_job
from jaxis.server.generation.prompts import ChatPrompt, PlainPrompts, thinking_variables
from jaxis.server.generation.served_model import ServedModel
from jaxis.server.http.body import MAX_INT32, new_id
from jaxis.server.ollama.ollama_errors import SAME_NAME
from jaxis.server.ollama.ollama_schema import (
    OllamaChatRequest,
    OllamaGenerateRequest,
    OllamaMessage,
    OllamaOptions,
    OllamaRequest,
)

_logger = logging.getLogger(__name__)


def chat_job(request: OllamaChatRequest, model: ServedModel) -> GenerationJob:
    """Returns the job of a request of /api/chat. A last message of the assistant is continued, as in Ollama.

    Raises RequestError if a field cannot be honoured.
    """
    model = model.named(request.model)
    messages = _template_messages(request.messages or [], model)
    last = messages[-1]
    goes_on = last["role"] == "assistant" and bool(last["content"]) and "tool_calls" not in last
    return _conversation_job(request, model, messages, continue_final_message=goes_on)


def generate_job(request: OllamaGenerateRequest, model: ServedModel) -> GenerationJob:
    """Returns the job of a request of /api/generate: an answer to a prompt, or its continuation.

    Raises RequestError if a field cannot be honoured.
    """
    model = model.named(request.model)
    has_template = model.tokenizer is not None and model.tokenizer.has_chat_template
    if has_template and not request.raw:
        messages = [{"role": "system", "content": request.system}] if request.system else []
        content = _content(request.prompt or "", request.images, model, "images")
        return _conversation_job(request, model, [*messages, {"role": "user", "content": content}])
    if request.images:
        why = "raw=true takes the prompt as it is" if has_template else "the model has no chat template"
        raise RequestError(f"cannot be honoured: {why}: leave images out", param="images")
    if request.system:
        why = "raw=true takes the prompt as it is" if has_template else "the model has no chat template"
        raise RequestError(f"cannot be honoured: {why}: put it into the prompt", param="system")
    if request.think:
        raise RequestError("cannot be honoured without a chat template: leave it out", param="think")
    answer = AnswerFormat(grammar=_grammar(request))
    settings = _settings(request)
    # Other completions are limited to 16 tokens by default; this limit is past the end of any context.
    settings["max_tokens"] = settings["max_tokens"] or MAX_INT32
    return make_job(
        new_id("cmpl"), model, PlainPrompts(prompts=[request.prompt or ""]), settings, answer, stream=request.streams
    )


def ignored_options(options: OllamaOptions | None, max_model_len: int) -> list[str]:
    """Returns "options.num_ctx" if it exceeds the context length; the log reports each value once."""
    if options is None or options.num_ctx is None or options.num_ctx <= max_model_len:
        return []
    _log_num_ctx(options.num_ctx, max_model_len)
    return ["options.num_ctx"]


@functools.lru_cache(maxsize=64)
def _log_num_ctx(num_ctx: int, max_model_len: int) -> None:
    _logger.info(
        "a request asks for num_ctx=%d, and the context is %d tokens long: start with a larger --max-model-len",
        num_ctx,
        max_model_len,
    )


def _conversation_job(
    request: OllamaRequest,
    model: ServedModel,
    messages: list[dict[str, Any]],
    *,
    continue_final_message: bool = False,
) -> GenerationJob:
    offered = (request.tools if isinstance(request, OllamaChatRequest) else None) or ()
    functions = [tool.function.model_dump(exclude_unset=True) for tool in offered]
    tools = choose_tools(model, {f"tools[{i}].function": function for i, function in enumerate(functions)}, None)
    prompt = ChatPrompt(
        messages=messages,
        tools=[{"type": "function", "function": function} for function in functions],
        variables=_thinking(request.think, model),
        continue_final_message=continue_final_message,
    )
    settings = _settings(request)
    if settings["thinking_token_budget"] is None:
        settings["thinking_token_budget"] = effort_budget(_effort(request.think), model)
    # If a model reasons although it should not, its reasoning is not sent.
    answer = AnswerFormat.of_chat(model, tools, _grammar(request), include_reasoning=request.think is not False)
    return make_job(new_id("chatcmpl"), model, prompt, settings, answer, stream=request.streams)


def _settings(request: OllamaRequest) -> dict[str, Any]:
    options = request.options or OllamaOptions()
    return {
        **{name: getattr(options, name) for name in SAME_NAME},
        "max_tokens": options.num_predict if (options.num_predict or 0) > 0 else None,
        "top_k": None if options.top_k is None else max(0, options.top_k),
        "seed": None if options.seed is None or options.seed < 0 else options.seed,
        "repetition_penalty": None if options.repeat_last_n == 0 else options.repeat_penalty,
        "logprobs": (request.top_logprobs or 0) if request.logprobs else None,
    }


def _grammar(request: OllamaRequest) -> AnswerGrammar | None:
    if isinstance(request.format, dict):
        return AnswerGrammar.of("format", json_schema=request.format)
    return AnswerGrammar.of("format", json_object=True) if request.format else None


def _thinking(think: bool | str | None, model: ServedModel) -> dict[str, Any]:
    """Returns variables of the chat template that switch reasoning.

    Raises RequestError if the request asks for reasoning, and the model does not reason.
    """
    if think is None:
        return {}
    variables = thinking_variables(bool(think), model.tokenizer)
    if think is False:
        return variables
    if model.parsers.reasoning is None:  # clients look for these words
        raise RequestError(f"{model.name!r} does not support thinking: leave think out, or send false")
    return variables | (effort_variables(_effort(think), model) or {})


def _effort(think: bool | str | None) -> str | None:
    if isinstance(think, str):
        return "high" if think == "max" else think
    return None


def _template_messages(messages: Sequence[OllamaMessage], model: ServedModel) -> list[dict[str, Any]]:
    """Returns the messages in the form of `ChatPrompt`, and adds missing ids of calls and results.

    An added id depends only on its place in the conversation, so that the prompts of later turns begin alike. It has
    nine letters and digits, the form that Mistral's templates accept.
    """
    converted = []
    unanswered: list[tuple[str, str]] = []  # (id, name) of calls without a result
    num_calls = 0
    for i, message in enumerate(messages):
        if message.images and message.role not in ("user", "tool"):
            raise RequestError("only messages of the user and of tools may have images", param=f"messages[{i}].images")
        calls = []
        for call in message.tool_calls or ():
            call_id = call.id or f"call{num_calls:05d}"
            num_calls += 1
            unanswered.append((call_id, call.function.name))
            arguments = json.dumps(call.function.arguments, ensure_ascii=False)
            function = {"name": call.function.name, "arguments": arguments}
            calls.append({"id": call_id, "type": "function", "function": function})
        call_id = message.tool_call_id or None
        if message.role == "tool":
            call_id = _answered(unanswered, call_id, message.tool_name)
        given = {
            "name": message.tool_name or None,
            "tool_call_id": call_id,
            "reasoning_content": message.thinking or None,
            "tool_calls": calls or None,
        }
        content = _content(message.content or "", message.images, model, f"messages[{i}].images")
        converted.append(
            {"role": message.role, "content": content or (None if calls else "")}
            | {name: value for name, value in given.items() if value is not None}
        )
    return converted


def _content(text: str, images: Sequence[str] | None, model: ServedModel, place: str) -> str | list[dict[str, Any]]:
    """Returns a content of a `ChatPrompt`; images come before the text of their message."""
    if not images:
        return text
    parts = [base64_part(data, model, f"{place}[{j}]") for j, data in enumerate(images)]
    return [*parts, {"type": "text", "text": text}] if text else parts


def _answered(unanswered: list[tuple[str, str]], call_id: str | None, name: str | None) -> str | None:
    """Returns the id of the call that a tool's message answers, and removes it from the list."""
    for index, (waiting_id, waiting_name) in enumerate(unanswered):
        if call_id == waiting_id or (call_id is None and name in (None, "", waiting_name)):
            del unanswered[index]
            return waiting_id
    return call_id
