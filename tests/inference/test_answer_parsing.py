"""Tool calls in conversations: apart from the text where model.tool_call_parser says so, else a part of it."""

import json
import re

from jaxis.inference import GenerationParams, JAXInferenceEngine, ModelParams

TOOLS = [{"type": "function", "function": {"name": "get_time", "parameters": {"type": "object"}}}]
CALL = '<tool_call>{"name": "get_time", "arguments": {"zone": "CET"}}</tool_call>'
# The embedded model calls nothing by itself.
GENERATION = GenerationParams(max_new_tokens=80, guided_decoding={"regex": re.escape(f"One moment.{CALL}")})
QUESTION = {"messages": [{"role": "user", "content": "What time is it?"}]}


def answers(parser, *conversations):
    params = ModelParams(tool_call_parser=parser, model_kwargs={"max_num_seqs": 4, "kv_cache_memory": "8MiB"})
    with JAXInferenceEngine(params, generation_params=GENERATION, show_progress=False) as engine:
        return [result.to_dict() for result in engine.infer(list(conversations))]


def test_calls_come_apart_with_ids_that_stay_the_same():
    rows = [{**QUESTION, "tools": TOOLS, "conversation_id": name} for name in ("a", "b")]
    first, second, free = answers("auto", *rows, QUESTION)
    message = first["messages"][-1]
    [call] = message["tool_calls"]
    assert (message["role"], message["content"]) == ("assistant", "One moment.")
    assert (call["type"], call["function"]["name"]) == ("function", "get_time")
    assert json.loads(call["function"]["arguments"]) == {"zone": "CET"}
    assert first["metadata"]["finish_reason"] == "tool_calls"
    assert call["id"] != second["messages"][-1]["tool_calls"][0]["id"]
    assert free["messages"][-1]["content"] == f"One moment.{CALL}"  # it was offered no tools
    assert answers("hermes", rows[0])[0] == first


def test_calls_stay_in_the_text_otherwise():
    [answer] = answers(None, {**QUESTION, "tools": TOOLS})
    assert answer["messages"][-1] == {"role": "assistant", "content": f"One moment.{CALL}"}
    assert answer["metadata"]["finish_reason"] == "stop"
