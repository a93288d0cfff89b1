"""Requests of many kinds whose answers are the same every time: greedy, or sampled with a seed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
MESSAGES, OLLAMA_CHAT, OLLAMA_GENERATE = "/v1/messages", "/api/chat", "/api/generate"
_QUESTIONS = (
    "What is the capital of France?",
    "What is 17 + 25?",
    "Name three animals.",
    "What color is the sky?",
    "Write the word cat backwards.",
    "Which is larger, 12 or 21?",
)
_SAMPLED = {"temperature": 0.9, "top_p": 0.95}
_THOUGHT = "Why is the sky blue? <think>"
_SOFT = {"thinking_token_budget": 6, "thinking_budget_grace_period": 20}
_STORY = "Once upon a time there was a small dog who lived in a house by the sea. " * 6


@dataclass(frozen=True)
class MixItem:
    """One request.

    Attributes:
      name: For reports.
      path: The endpoint.
      body: Without `stream`.
    """

    name: str
    path: str
    body: dict[str, Any]


def request_mix() -> list[MixItem]:
    """All of them."""
    items = [
        item
        for number, question in enumerate(_QUESTIONS)
        for item in (
            _chat(f"greedy {number}", question, temperature=0, max_tokens=48),
            _chat(f"sampled {number}", question, **_SAMPLED, seed=number, max_tokens=64),
            MixItem(
                f"response {number}", RESPONSES, {"input": question, "temperature": 0, "max_output_tokens": 24 + number}
            ),
        )
    ]
    items += [
        _chat("three choices", "Tell me a story.", **_SAMPLED, seed=5, n=3, max_tokens=40),
        _chat("logprobs", "What is 3 + 4?", temperature=0, logprobs=True, top_logprobs=5, max_tokens=24),
        _chat("conversation", _STORY + "Who lived by the sea?", temperature=0, max_tokens=32),
        _chat("until the context's end", "Count.", temperature=0, ignore_eos=True, max_tokens=600),
        _complete("greedy", "The capital of France is", temperature=0, max_tokens=32),
        _complete("sampled with filters", "Once", temperature=1.2, top_k=40, min_p=0.02, seed=2**40, max_tokens=80),
        _complete("batch of prompts", ["The sun", "The moon", "A red"], temperature=0, max_tokens=20),
        _complete("stop texts", _STORY, temperature=0.7, seed=11, stop=["dog", ".\n", "sea"], max_tokens=60),
        _complete("stop tokens", "One two three", temperature=0.7, seed=3, stop_token_ids=[15, 16], max_tokens=60),
        _complete("logprobs", "The cat", temperature=0.5, seed=9, logprobs=3, max_tokens=30),
        _complete("echo", "A dog is", temperature=0, echo=True, logprobs=1, max_tokens=12),
        _complete("penalties", "la la la", temperature=0.8, seed=1, frequency_penalty=0.8, presence_penalty=0.4),
        _complete("repetition penalty", "The the", temperature=0, repetition_penalty=1.3, max_tokens=40),
        _complete("bias", "Yes or no:", temperature=0, logit_bias={"42": 3.0, "43": -100}, max_tokens=20),
        _complete("bad words", "Once upon", temperature=0, bad_words=["a time"], max_tokens=30),
        _complete("token ids", list(range(20, 90)), **_SAMPLED, seed=0, n=2, min_tokens=4, max_tokens=50),
        _complete("long", _STORY * 4, temperature=0, ignore_eos=True, max_tokens=150),
        _chat("JSON", _QUESTIONS[0], temperature=0, response_format={"type": "json_object"}, max_tokens=40),
        _chat("JSON schema", "Who are you?", **_SAMPLED, seed=2, response_format=_schema_format(), max_tokens=60),
        _chat("tool call", _QUESTIONS[1], temperature=0, tools=[_tool()], tool_choice="required", max_tokens=80),
        _chat("strict tool", _QUESTIONS[1], temperature=0, tools=[_tool(strict=True)], max_tokens=60),
        _chat("strict tool, sampled", _QUESTIONS[5], **_SAMPLED, seed=4, tools=[_tool(strict=True)], max_tokens=60),
        _complete("hard thinking budget", _THOUGHT, temperature=0, thinking_token_budget=12, max_tokens=40),
        _complete("soft thinking budget", _THOUGHT, **_SAMPLED, seed=7, **_SOFT, n=2, max_tokens=48),
        _complete("no thinking", _THOUGHT, temperature=0, thinking_token_budget=0, logprobs=1, max_tokens=24),
        _complete("regex", "A number:", **_SAMPLED, seed=8, structured_outputs={"regex": "[1-9][0-9]{2,6}"}, n=2),
        _complete("choice", "It is", temperature=0, structured_outputs={"choice": ["red", "green", "dark blue"]}),
        _complete("one token", "Hello", temperature=0, max_tokens=1),
        _message("greedy", _QUESTIONS[0], temperature=0, max_tokens=40),
        _message("stop sequence", _QUESTIONS[2], temperature=0, stop_sequences=["a"], max_tokens=40),
        _message("tool", _QUESTIONS[1], temperature=0, tools=[_message_tool()], tool_choice={"type": "any"}),
        _ollama("greedy", _QUESTIONS[0], options={"temperature": 0, "num_predict": 40}),
        _ollama("sampled", _QUESTIONS[3], options={"temperature": 0.9, "top_k": 40, "seed": 6, "num_predict": 60}),
        _ollama("JSON", "Who are you?", format="json", options={"temperature": 0, "num_predict": 40}),
        MixItem(
            "ollama: thinking budget",
            OLLAMA_GENERATE,
            {
                "model": "any",
                "prompt": _THOUGHT,
                "raw": True,
                "options": {"temperature": 0, "num_predict": 30, "thinking_token_budget": 9},
            },
        ),
        MixItem(
            "ollama: generate",
            OLLAMA_GENERATE,
            {"model": "any", "prompt": "The sun", "raw": True, "options": {"temperature": 0, "num_predict": 30}},
        ),
    ]
    return items


def _tool(**fields: Any) -> dict[str, Any]:
    function = {"name": "add", "description": "Adds numbers.", "parameters": _addends(), **fields}
    return {"type": "function", "function": function}


def _message_tool() -> dict[str, Any]:
    return {"name": "add", "description": "Adds numbers.", "input_schema": _addends()}


def _addends() -> dict[str, Any]:
    parameters = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}
    return {**parameters, "required": ["a", "b"], "additionalProperties": False}


def _schema_format() -> dict[str, Any]:
    properties = {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer"}, "tall": {"type": "boolean"}}
    schema = {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}
    return {"type": "json_schema", "json_schema": {"name": "person", "schema": schema}}


def _chat(name: str, question: str, **fields: Any) -> MixItem:
    return MixItem(f"chat: {name}", CHAT, {"messages": [{"role": "user", "content": question}], **fields})


def _complete(name: str, prompt: str | list[Any], **fields: Any) -> MixItem:
    return MixItem(f"completion: {name}", COMPLETIONS, {"prompt": prompt, **fields})


def _message(name: str, question: str, **fields: Any) -> MixItem:
    body = {"model": "any", "max_tokens": 60, "messages": [{"role": "user", "content": question}], **fields}
    return MixItem(f"message: {name}", MESSAGES, body)


def _ollama(name: str, question: str, **fields: Any) -> MixItem:
    body = {"model": "any", "messages": [{"role": "user", "content": question}], **fields}
    return MixItem(f"ollama: {name}", OLLAMA_CHAT, body)
