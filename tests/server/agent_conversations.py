"""Conversations of agents that grow turn by turn, as the request bodies of each protocol.

What an agent says of the past never changes, but how it writes it does: text is a string in one request and a list of
blocks in the next, marks for caches move, lists of tools grow, and lines at the head count something.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from random import Random

WORDS = ["the", "file", "reads", "two", "values", "and", "writes", "none,", "so", "look", "again", "src/main.py:", "42"]
SCHEMA = {"type": "object", "properties": {"path": {"type": "string"}, "at": {"type": "integer"}}, "required": ["path"]}


@dataclass
class Answer:
    """Parts of a model's answer: reasoning, text, and calls as (id, name, arguments)."""

    thinking: str
    text: str
    calls: list[tuple[str, str, dict]] = field(default_factory=list)


@dataclass
class AgentConversation:
    """A conversation, and the ways to send it.

    Attributes:
      with_tools: False leaves them out.
      steps: ("user", text), ("late", text), ("answer", Answer) and ("results", [(call id, text)]), in order.
      deferred: Names of tools that were loaded later, in the order in which they were.
    """

    random: Random
    with_tools: bool = True
    steps: list[tuple[str, object]] = field(default_factory=list)
    deferred: list[str] = field(default_factory=list)
    num_calls: int = 0

    def __post_init__(self):
        self.steps.append(("user", self._text()))
        self.steps.append(("late", self._text()))

    def grow(self):
        """An answer, and what comes after it; returns whether that is a new question."""
        answer = Answer(self._text(), self._text() if self.random.random() < 0.7 else "")
        wants_more = self.with_tools and self.random.random() < 0.7
        for _ in range(self.random.randint(1, 3) if wants_more else 0):
            self.num_calls += 1
            arguments = {"path": self._text(), "at": self.num_calls}
            answer.calls.append((f"call_{self.num_calls:024x}", self.random.choice(["read_file", "search"]), arguments))
        if not answer.calls and not answer.text:
            answer.text = self._text()
        self.steps.append(("answer", answer))
        if not answer.calls:
            self.steps.append(("user", self._text()))
            if self.random.random() < 0.3:
                self.steps.append(("late", self._text()))
            return True
        results = [(call_id, self._text()) for call_id, _, _ in answer.calls]
        if self.random.random() < 0.5:
            self.deferred.append(f"tool_{self.random.randint(0, 999):03}_{len(self.deferred)}")
            results[0] = (results[0][0], self.deferred[-1])
        self.steps.append(("results", results))
        return False

    def messages_request(self):
        """The body in Anthropic's Messages, with what Claude Code varies."""
        rest = "You are an agent.\nUse the tools."
        tokens_left = f"{rest}\n<total_tokens>{self.random.randint(1, 10**6)} tokens left</total_tokens>"
        billing = (
            f"x-anthropic-billing-header: cc_version=2.1.330.{self.random.randint(0, 4095):03x}; cc_entrypoint=cli;"
        )
        system = [{"type": "text", "text": billing}, {"type": "text", "text": self.random.choice([rest, tokens_left])}]
        tools = [
            {"name": name, "description": f"To {name}", "input_schema": SCHEMA} for name in ("read_file", "search")
        ]
        tools += [
            {"name": name, "input_schema": SCHEMA, "defer_loading": True} for name in ("tool_never", *self.deferred)
        ]
        tools.sort(key=lambda tool: tool["name"])
        messages = [self._messages_turn(kind, value) for kind, value in self.steps]
        if isinstance(messages[-1]["content"], list):
            messages[-1]["content"][-1]["cache_control"] = {"type": "ephemeral"}
        return {
            "model": "jaxis-tiny",
            "max_tokens": 32000,
            "system": system,
            "tools": tools if self.with_tools else [],
            "messages": messages,
            "stream": True,
            "metadata": {"user_id": json.dumps({"session": self.random.random()})},
        }

    def chat_request(self):
        """The body in OpenAI's chat completions."""
        messages = [{"role": "system", "content": self._parts("You are an agent.")}]
        for kind, value in self.steps:
            if kind == "answer":
                calls = [
                    {"id": call_id, "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}
                    for call_id, name, arguments in value.calls
                ]
                message = {"role": "assistant", "content": value.text or None, "reasoning_content": value.thinking}
                messages.append({**message, "tool_calls": calls} if calls else message)
            elif kind == "results":
                messages += [
                    {"role": "tool", "tool_call_id": call_id, "content": self._parts(text)} for call_id, text in value
                ]
            else:
                role = {"user": "user", "late": self.random.choice(["system", "developer"])}[kind]
                messages.append({"role": role, "content": self._parts(value)})
        return {"model": "jaxis-tiny", "messages": messages, "tools": self._functions(), "stream": True}

    def responses_request(self):
        """The body in OpenAI's Responses, with what Codex sends."""
        items = [{"type": "message", "role": "developer", "content": self._input_text("You are an agent.")}]
        for kind, value in self.steps:
            if kind == "answer":
                thinking = [{"type": "reasoning_text", "text": value.thinking}]
                items.append({"type": "reasoning", "summary": [], "content": thinking})
                if value.text:
                    items.append({"type": "message", "role": "assistant", "content": self._output_text(value.text)})
                items += [
                    {"type": "function_call", "call_id": call_id, "name": name, "arguments": json.dumps(arguments)}
                    for call_id, name, arguments in value.calls
                ]
            elif kind == "results":
                items += [
                    {"type": "function_call_output", "call_id": call_id, "output": self._input_text(text)}
                    for call_id, text in value
                ]
            else:
                role = {"user": "user", "late": "developer"}[kind]
                items.append({"type": "message", "role": role, "content": self._input_text(value)})
        tools = [{"type": "function", **tool["function"]} for tool in self._functions()]
        return {"model": "jaxis-tiny", "input": items, "tools": tools, "stream": True}

    def ollama_request(self):
        """The body in Ollama's chat, whose calls have arguments as objects, and ids only with some clients."""
        messages = [{"role": "system", "content": "You are an agent."}]
        names = {}
        for kind, value in self.steps:
            if kind == "answer":
                names |= {call_id: name for call_id, name, _ in value.calls}
                calls = [{"function": {"name": name, "arguments": arguments}} for _, name, arguments in value.calls]
                message = {"role": "assistant", "content": value.text, "thinking": value.thinking}
                messages.append({**message, "tool_calls": calls} if calls else message)
            elif kind == "results":
                messages += [{"role": "tool", "tool_name": names[call_id], "content": text} for call_id, text in value]
            else:
                messages.append({"role": {"user": "user", "late": "system"}[kind], "content": value})
        options = self.random.choice([{}, {"num_ctx": 32768, "temperature": 0.5}])
        return {"model": "jaxis-tiny", "messages": messages, "tools": self._functions(), "options": options}

    def _messages_turn(self, kind, value):
        if kind == "answer":
            blocks = [{"type": "thinking", "thinking": value.thinking, "signature": f"{self.random.random()}"}]
            blocks += [{"type": "text", "text": value.text}] if value.text else []
            blocks += [
                {"type": "tool_use", "id": call_id.replace("call_", "toolu_"), "name": name, "input": arguments}
                for call_id, name, arguments in value.calls
            ]
            return {"role": "assistant", "content": blocks}
        if kind == "results":
            return {"role": "user", "content": [self._messages_result(*result) for result in value]}
        role = {"user": "user", "late": "system"}[kind]
        return {"role": role, "content": self._blocks(value)}

    def _messages_result(self, call_id, text):
        content = self._blocks(text)
        if text in self.deferred:
            content = [{"type": "tool_reference", "tool_name": text}]
        return {"type": "tool_result", "tool_use_id": call_id.replace("call_", "toolu_"), "content": content}

    def _functions(self):
        return [
            {"type": "function", "function": {"name": name, "description": f"To {name}", "parameters": SCHEMA}}
            for name in (("read_file", "search") if self.with_tools else ())
        ]

    def _text(self):
        return " ".join(self.random.choices(WORDS, k=self.random.randint(1, 12)))

    def _either(self, text, blocks):
        return self.random.choice([text, blocks])

    def _blocks(self, text):
        return self._either(text, [{"type": "text", "text": text}])

    _parts = _blocks

    def _input_text(self, text):
        return self._either(text, [{"type": "input_text", "text": text}])

    def _output_text(self, text):
        return self._either(text, [{"type": "output_text", "text": text}])
