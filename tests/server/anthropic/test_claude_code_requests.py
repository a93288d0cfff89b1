"""Requests of the shapes that Claude Code sends, with other words in them."""

import json

import pytest

from tests.support.scripted_engine import ScriptedEngine, asking

BETAS = "claude-code-20250219,interleaved-thinking-2025-05-14,context-management-2025-06-27,effort-2025-11-24"
HEADERS = {"anthropic-version": "2023-06-01", "anthropic-beta": BETAS, "x-app": "cli", "x-api-key": "key"}
EPHEMERAL = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
SCHEMA = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "type": "object",
    "properties": {"command": {"type": "string"}, "timeout": {"type": "number", "maximum": 600000}},
    "required": ["command"],
    "additionalProperties": False,
}


def tool(name, **more):
    return {"name": name, "description": f"What {name} does.", "input_schema": SCHEMA, **more}


def first_request():
    return {
        "model": "jaxis-tiny",
        "messages": [
            {
                "role": "user",
                "content": [
                    {"type": "text", "text": "<system-reminder>\nFacts about the folder.\n</system-reminder>\n"},
                    {"type": "text", "text": "List the files.", **EPHEMERAL},
                ],
            },
            {"role": "system", "content": [{"type": "text", "text": "Tools found by search: none."}]},
        ],
        "system": [
            {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1.330.f8c; cc_entrypoint=sdk-cli;"},
            {"type": "text", "text": "You are an agent.", **EPHEMERAL},
            {"type": "text", "text": "\nWork in the folder.\n", **EPHEMERAL},
        ],
        "tools": [
            tool("Bash"),
            tool("Placeholder", defer_loading=True),
            tool("ToolSearch", eager_input_streaming=True),
        ],
        "metadata": {"user_id": json.dumps({"device_id": "0", "session_id": "1"})},
        "max_tokens": 32000,
        "thinking": {"type": "adaptive", "display": "summarized"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "output_config": {"effort": "high"},
        "safeguards": [{"type": "dangerous_tool_use", "mode": "report"}],
        "stream": True,
    }


def later_request(first, answer):
    """The next request: the answer and the results of its calls, and the same past in other shapes."""
    request = json.loads(json.dumps(first))
    request["system"][0]["text"] = "x-anthropic-billing-header: cc_version=2.1.330.440; cc_entrypoint=sdk-cli;"
    request["tools"].insert(1, tool("Fetch", defer_loading=True))
    user, late = request["messages"]
    del user["content"][1]["cache_control"]
    late["content"] = late["content"][0]["text"]
    late["output_config"] = {"effort": "high"}
    found = [{"type": "tool_reference", "tool_name": "Fetch"}]
    more = {"Bash": {"content": "main.py", "is_error": False, **EPHEMERAL}, "ToolSearch": {"content": found}}
    results = [
        {"type": "tool_result", "tool_use_id": block["id"], **more[block["name"]]}
        for block in answer
        if block["type"] == "tool_use"
    ]
    request["messages"] += [{"role": "assistant", "content": answer}, {"role": "user", "content": results}]
    return request


@pytest.fixture(scope="module")
def engine():
    return ScriptedEngine(max_model_len=100_000)


@pytest.fixture(scope="module")
def http(engine):
    with asking(engine, api_keys=("key",)) as http:
        yield http


def send(http, body):
    answer = http.post("/v1/messages?beta=true", headers=HEADERS, json=body)
    assert answer.status_code == 200, answer.text
    assert "x-jaxis-ignored" not in answer.headers
    return answer


def test_a_turn_with_tools_keeps_the_prefix(engine, http):
    calls = [{"name": "Bash", "arguments": {"command": "ls"}}, {"name": "ToolSearch", "arguments": {"command": "x"}}]
    engine.text = "<think>\nhm\n</think>\n\nI look." + "".join(f"<tool_call>{json.dumps(c)}</tool_call>" for c in calls)
    first = first_request()
    answer = send(http, {**first, "stream": False}).json()
    assert [block["type"] for block in answer["content"]] == ["thinking", "text", "tool_use", "tool_use"]
    assert answer["stop_reason"] == "tool_use"
    before = engine.prompt
    events = send(http, later_request(first, answer["content"])).text
    assert events.startswith("event: message_start\n")
    assert "[DONE]" not in events
    assert engine.prompt.startswith(before[: before.rindex("[assistant]")] + "[assistant]<think>hm</think>I look.")
    assert '"name": "Fetch"' in engine.prompt[len(before) :]
    assert "billing" not in engine.prompt
    assert "Placeholder" not in engine.prompt
    assert engine.params.max_tokens == 32000
