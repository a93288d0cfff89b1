from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jaxis.errors import RequestError
from jaxis.server.generation.answer_format import AnswerFormat, choose_tools
from jaxis.server.generation.effort import effort_budget, effort_variables
from jaxis.server.generation.images import image_part, video_part
from jaxis.server.generation.job import GenerationJob, make_job
from jaxis.server.generation.prompts import ChatPrompt, template_variables
from jaxis.server.generation.served_model import ServedModel
from jaxis.server.http.body import new_id
from jaxis.server.openai.chat_schema import (
    ChatCompletionRequest,
    ChatMessage,
    ChatPart,
    ContentPart,
    ImagePart,
    VideoPart,
    VideoUrlPart,
)
from jaxis.server.openai.fields import NamedToolChoice, RefusalPart
from jaxis.server.openai.job_parameters import answer_grammar, check_stream_options, sampling_settings, token_limit


def chat_job(request: ChatCompletionRequest, model: ServedModel) -> GenerationJob:
    """Returns the job of a request of /v1/chat/completions. Raises RequestError if a field cannot be honoured."""
    prompt = chat_prompt(request, model)
    model = model.named(request.model)
    check_stream_options(request)
    if request.echo and not request.continue_final_message:
        raise RequestError("needs continue_final_message=true: add it, or leave echo out", param="echo")
    if request.top_logprobs is not None and not request.logprobs:
        raise RequestError("needs logprobs=true: add it", param="top_logprobs")
    grammar = answer_grammar(request)
    settings = sampling_settings(request) | {
        "max_tokens": token_limit(request.max_tokens, request.max_completion_tokens),
        "logprobs": (request.top_logprobs or 0) if request.logprobs else None,
        "prediction": None if request.prediction is None else request.prediction.text,
    }
    if request.thinking_token_budget is None:
        settings["thinking_token_budget"] = effort_budget(request.reasoning_effort, model)
    choice = request.tool_choice
    tools = choose_tools(
        model,
        {f"tools[{i}].function": tool.function.model_dump() for i, tool in enumerate(request.tools or ())},
        choice.model_dump() if isinstance(choice, NamedToolChoice) else choice,
        parallel=request.parallel_tool_calls is not False,
    )
    answer = AnswerFormat.of_chat(model, tools, grammar, include_reasoning=request.include_reasoning is not False)
    return make_job(
        new_id("chatcmpl"), model, prompt, settings, answer, priority=request.priority, stream=request.stream
    )


def chat_prompt(request: ChatCompletionRequest, model: ServedModel) -> ChatPrompt:
    """Returns the prompt of a request.

    Raises RequestError if chat_template_kwargs sets a reserved name, or neither the model nor the server supports
    reasoning_effort.
    """
    variables = template_variables(request.chat_template_kwargs, model.tokenizer)
    of_effort = effort_variables(request.reasoning_effort, model)
    if of_effort is None:
        budgets = f", and the server knows {', '.join(model.effort_budgets)} only" if model.effort_budgets else ""
        raise RequestError(
            f"={request.reasoning_effort!r} cannot be honoured: the model's chat template does not read it{budgets}",
            param="reasoning_effort",
        )
    shown = () if request.tool_choice == "none" else request.tools or ()
    return ChatPrompt(
        messages=template_messages(request.messages, model),
        tools=[tool.model_dump(exclude_unset=True) for tool in shown],
        variables=variables | of_effort,
        add_generation_prompt=request.add_generation_prompt,
        continue_final_message=bool(request.continue_final_message),
        cache_salt=request.cache_salt,
    )


def template_messages(messages: Sequence[ChatMessage], model: ServedModel) -> list[dict[str, Any]]:
    """Returns messages in the form of `ChatPrompt`.

    Raises RequestError if the model takes no images, or an image is at an address or in a message of another role than
    user or tool.
    """
    converted = []
    answered: dict[str, Any] = {}
    for i, message in enumerate(messages):
        fields = _template_message(message, model, f"messages[{i}]")
        if (function := message.function_call) is not None:
            # Some templates accept only ids of nine letters and digits.
            answered = {"tool_call_id": f"call{i:05d}"}
            call = {"id": answered["tool_call_id"], "type": "function", "function": function.model_dump()}
            fields |= {"content": fields["content"] or None, "tool_calls": [*fields.get("tool_calls", ()), call]}
        elif message.role == "function":
            fields |= {"role": "tool", **answered}
        converted.append(fields)
    return converted


def _template_message(message: ChatMessage, model: ServedModel, place: str) -> dict[str, Any]:
    fields: dict[str, Any] = {"role": message.role, "content": _content(message, model, f"{place}.content")}
    for name in ("name", "tool_call_id"):
        if (value := getattr(message, name)) is not None:
            fields[name] = value
    if (reasoning := message.reasoning_content or message.reasoning) is not None:
        fields["reasoning_content"] = reasoning
    if message.tool_calls:
        fields["tool_calls"] = [call.model_dump(exclude={"index"}, exclude_none=True) for call in message.tool_calls]
        fields["content"] = fields["content"] or None
    return fields


def _content(message: ChatMessage, model: ServedModel, place: str) -> str | list[dict[str, Any]]:
    """Returns one string, which every template accepts, unless the message has images or videos."""
    content = message.content
    if not isinstance(content, list) or all(isinstance(part, ContentPart | RefusalPart) for part in content):
        return message.text
    if message.role not in ("user", "tool"):
        raise RequestError(
            "has an image or a video, which only messages of the user and of tools may have", param=place
        )
    return [_part(part, model, f"{place}[{j}]") for j, part in enumerate(content)]


def _part(part: ChatPart, model: ServedModel, place: str) -> dict[str, Any]:
    match part:
        case ImagePart():
            return image_part(part.image_url.url, model, f"{place}.image_url.url")
        case VideoPart():
            return video_part(part.video, part.fps, model, f"{place}.video")
        case VideoUrlPart():
            return video_part(part.video_url.url, part.fps, model, f"{place}.video_url.url")
        case ContentPart() | RefusalPart():
            return {"type": "text", "text": part.text}
