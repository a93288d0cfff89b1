"""The server reads what it says: answers that were cut anywhere come back as history, in each protocol."""

import contextlib
import functools
import itertools
import json
import re

import anthropic
import ollama
import pytest

from jaxis.tokenizer.chat_messages import with_template_arguments
from jaxis.tokenizer.chat_template import render_chat_template
from tests.parsing.tool_call_formats import FORMATS
from tests.support.scripted_engine import ScriptedClient, ScriptedEngine, asking

MODEL = "jaxis-tiny"
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "array"}}}
FUNCTIONS = [{"name": "get_weather", "parameters": SCHEMA}, {"name": "now", "parameters": {"type": "object"}}]
TOOLS = [{"type": "function", "function": function} for function in FUNCTIONS]
RESPONSE_TOOLS = [{"type": "function", **function} for function in FUNCTIONS]
QUESTION = {"role": "user", "content": "Weather?"}
GO_ON = {"role": "user", "content": "Go on."}
GENERATED_ID = re.compile(r"call_[0-9a-f]{24}|\b[A-Za-z0-9]{9}\b")  # also of Mistral's


class Clients:
    """The clients of each protocol, of a server in this process."""

    def __init__(self, http):
        self.http = http
        self.openai = ScriptedClient(http)
        self.anthropic = anthropic.Anthropic(
            base_url="http://testserver", api_key="none", http_client=http, max_retries=0
        )
        self.ollama = ollama.Client()
        self.ollama._client = http


def chat(clients, history, stream):
    asked = {"model": MODEL, "messages": history, "tools": TOOLS}
    if not stream:
        return [clients.openai.chat.completions.create(**asked).choices[0].message.model_dump()]
    with clients.openai.chat.completions.stream(**asked) as events:
        for _ in events:
            pass
        return [events.current_completion_snapshot.choices[0].message.model_dump()]


def chat_results(said):
    return [{"role": "tool", "tool_call_id": call["id"], "content": "error"} for call in said[0]["tool_calls"] or ()]


def responses(clients, history, stream):
    asked = clients.openai.responses.create(model=MODEL, input=history, tools=RESPONSE_TOOLS, stream=stream)
    if not stream:
        return [item.model_dump() for item in asked.output]
    # Also the text of a call that is no call in the end, which a client keeps that does not wait for the last event.
    return [event.item.model_dump() for event in asked if event.type == "response.output_item.done"]


def response_results(said):
    calls = [item["call_id"] for item in said if item["type"] == "function_call"]
    return [{"type": "function_call_output", "call_id": call_id, "output": "error"} for call_id in calls]


def stored(clients, history, stream):
    """Goes on from the stored response."""
    [*_, (place, previous)] = [(-1, None), *((i, item["id"]) for i, item in enumerate(history) if "calls" in item)]
    more = {} if previous is None else {"previous_response_id": previous}
    asked = clients.openai.responses.create(
        model=MODEL, input=history[place + 1 :], tools=RESPONSE_TOOLS, stream=stream, **more
    )
    response = list(asked)[-1].response if stream else asked  # a stream that is left unread ends at any time
    return [{"id": response.id, "calls": [item.model_dump() for item in response.output]}]


def referenced(clients, history, stream):
    """Names the stored items, as the AI SDK does."""
    said = responses(clients, history, stream)
    return [{"type": "item_reference", "id": item["id"]} for item in said]


def messages(clients, history, stream):
    tools = [{"name": each["name"], "input_schema": each["parameters"]} for each in FUNCTIONS]
    asked = {"model": MODEL, "messages": history, "tools": tools, "max_tokens": 1000}
    if stream:
        with clients.anthropic.messages.stream(**asked) as events:
            message = events.get_final_message()
    else:
        message = clients.anthropic.messages.create(**asked)
    return [{"role": "assistant", "content": [block.model_dump() for block in message.content]}]


def message_results(said):
    calls = [block["id"] for block in said[0]["content"] if block["type"] == "tool_use"]
    results = [{"type": "tool_result", "tool_use_id": call_id, "content": "error"} for call_id in calls]
    return [{"role": "user", "content": results}] if results else []


def ollama_chat(clients, history, stream):
    asked = clients.ollama.chat(MODEL, history, tools=TOOLS, stream=stream)
    whole = {"role": "assistant", "content": "", "thinking": "", "tool_calls": []}
    for part in asked if stream else [asked]:
        whole["content"] += part.message.content or ""
        whole["thinking"] += part.message.thinking or ""
        whole["tool_calls"] += [call.model_dump() for call in part.message.tool_calls or ()]
    return [whole]


def ollama_results(said):
    return [
        {"role": "tool", "tool_name": call["function"]["name"], "content": "error"} for call in said[0]["tool_calls"]
    ]


PROTOCOLS = {
    "chat": (chat, chat_results),
    "responses": (responses, response_results),
    "stored": (stored, lambda said: response_results(said[0]["calls"])),
    "referenced": (referenced, lambda said: []),
    "messages": (messages, message_results),
    "ollama": (ollama_chat, ollama_results),
}


@contextlib.contextmanager
def clients_of(form):
    """A scripted model that writes a format, and clients of a server over it."""
    engine = ScriptedEngine("{% if tools %}{{ tools | length }}{% endif %}" + form.template, max_model_len=100_000)
    engine.finish_reason, engine.piece = "length", 7
    with asking(engine, tool_call_parser=form.tool, reasoning_parser=form.reasoning or "none") as http:
        yield engine, Clients(http)


def turn_text(form):
    """A turn of reasoning, content and calls, as the format's template writes it."""
    functions = [("get_weather", {"city": 'Köln "x"\nNord', "days": [1, {"a": None}]}), ("now", {})]
    calls = [
        {"id": f"functions.{name}:{i}", "type": "function", "function": {"name": name, "arguments": json.dumps(value)}}
        for i, (name, value) in enumerate(functions[: form.num_calls])
    ]
    turn = {"role": "assistant", "content": "I look." if form.has_content else "", "tool_calls": calls}
    turn |= {"reasoning_content": "Hm."} if form.reasoning else {}
    written = with_template_arguments([QUESTION, turn], form.template)
    return render_chat_template(form.template, written, add_generation_prompt=False).removeprefix("USER")


def cuts_of(text):
    """Places where tokens end: after each marker, word, space and sign."""
    return [match.end() for match in re.finditer(r"<[^<>]*>|\[/?[A-Z_]+\]|\w+|\s+|.", text, re.DOTALL)]


@pytest.mark.sampled(20)
@pytest.mark.parametrize("step", [11, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("name", FORMATS)
def test_an_answer_that_is_cut_anywhere_comes_back(name, protocol, step):
    form = FORMATS[name]
    answer, results = PROTOCOLS[protocol]
    text = turn_text(form)
    with clients_of(form) as (engine, clients):
        for cut in cuts_of(text)[::-step]:
            prompts = []
            for stream in (False, True):
                engine.text = text[:cut]
                said = answer(clients, [QUESTION], stream)
                for more in ([], results(said)):
                    answer(clients, [QUESTION, *said, *more, GO_ON], stream)
                    prompts.append(GENERATED_ID.sub("ID", engine.prompt))
            assert prompts[:2] == prompts[2:], "as it was streamed"


def announced(events):
    """The final response of a stream, whose items are those that were announced, each at its own index."""
    items = {}
    for event in events:
        if event.type == "response.output_item.added":
            assert event.output_index == len(items)
            items[event.item.id] = event.output_index
        elif event.type == "response.output_item.done":
            assert items[event.item.id] == event.output_index
        elif hasattr(event, "item_id"):
            assert items[event.item_id] == event.output_index
    assert [item.id for item in event.response.output] == list(items)
    return event.response


@pytest.mark.sampled(9)
@pytest.mark.parametrize("step", [13, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", FORMATS)
def test_what_a_stream_announced_is_stored_though_the_call_turns_out_malformed(name, step):
    form = FORMATS[name]
    text = turn_text(form)
    cuts = [0, *cuts_of(text)]
    with clients_of(form) as (engine, clients):
        engine.finish_reason = "stop"
        create = functools.partial(clients.openai.responses.create, model=MODEL, tools=RESPONSE_TOOLS)
        for start, end in list(itertools.pairwise(cuts))[::step]:
            engine.text = f"{text[:start]}]}}{text[end:]}"  # in place of a token
            whole = create(input=[QUESTION])
            said = announced(create(input=[QUESTION], stream=True))
            assert clients.openai.responses.retrieve(said.id).output == said.output
            prompts = []
            for response in (whole, said):
                items = [item.model_dump() for item in response.output]
                references = [{"type": "item_reference", "id": item["id"]} for item in items]
                for history in (items, references):
                    create(input=[QUESTION, *history, GO_ON])
                    prompts.append(GENERATED_ID.sub("ID", engine.prompt))
                create(input=[GO_ON], previous_response_id=response.id)
                prompts.append(GENERATED_ID.sub("ID", engine.prompt))
            assert set(prompts) == {prompts[0]}, "as the whole answer that has no malformed call"
