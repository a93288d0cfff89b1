"""Requests of the shape that Codex sends, with content of our own: every part is read, and every event is in order."""

import json

import openai
import pytest

from tests.support.scripted_engine import ScriptedEngine, connected

GRAMMAR = """start: begin line+ end
begin: "*** Begin" LF
line: "+" /(.*)/ LF -> line
end: "*** End" LF?

%import common.LF
"""
EXECUTE = {
    "type": "function",
    "name": "exec_command",
    "description": "Runs a command.",
    "strict": False,
    "parameters": {"type": "object", "properties": {"cmd": {"type": "string"}}, "required": ["cmd"]},
}
TOOLS = [
    EXECUTE,
    {
        "type": "namespace",
        "name": "agents",
        "description": "Tools for agents.",
        "tools": [
            {"type": "function", "name": "wait", "strict": False, "parameters": {"type": "object", "properties": {}}}
        ],
    },
    {"type": "web_search", "external_web_access": False},
    {"type": "tool_search", "execution": "client", "parameters": {"type": "object", "properties": {}}},
    {
        "type": "custom",
        "name": "edit",
        "description": "Edits files.",
        "format": {"type": "grammar", "syntax": "lark", "definition": GRAMMAR},
    },
]
EDIT = '*** Begin\n+say "hi"\n*** End\n'
ANSWER = (
    "<think>\nhm\n</think>\n\nI look."
    '<tool_call>{"name": "exec_command", "arguments": {"cmd": "ls"}}</tool_call>'
    '<tool_call>{"name": "agents__wait", "arguments": {}}</tool_call>'
    f'<tool_call>{{"name": "edit", "arguments": {json.dumps({"input": EDIT})}}}</tool_call>'
)


def message(role, *texts):
    kind = "output_text" if role == "assistant" else "input_text"
    return {
        "type": "message",
        "id": f"msg_{role}{len(texts)}",
        "role": role,
        "content": [{"type": kind, "text": text} for text in texts],
    }


FIRST = [
    message("developer", "You are an agent."),
    message("developer", "Skills: none.", "Permissions: all."),
    message("user", "Here is /tmp."),
    message("user", "List it."),
]
LATER = [
    *FIRST,
    {
        "type": "reasoning",
        "id": "rs_1",
        "summary": [],
        "content": [{"type": "reasoning_text", "text": "hm"}],
        "encrypted_content": None,
    },
    {**message("assistant", "I look."), "status": "completed", "phase": "commentary"},
    {
        "type": "function_call",
        "id": "fc_1",
        "call_id": "a",
        "name": "exec_command",
        "arguments": '{"cmd": "ls"}',
        "status": "completed",
    },
    {"type": "function_call", "call_id": "b", "name": "wait", "namespace": "agents", "arguments": "{}"},
    {"type": "custom_tool_call", "id": "ctc_1", "call_id": "c", "name": "edit", "input": EDIT, "status": "completed"},
    {"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {"type": "search", "query": "x"}},
    {"type": "function_call_output", "id": "fco_1", "call_id": "a", "output": "x.txt"},
    {"type": "function_call_output", "call_id": "b", "output": [{"type": "input_text", "text": "done"}]},
    {"type": "custom_tool_call_output", "call_id": "c", "output": "edited"},
]
BODY = {
    "model": "jaxis-tiny",
    "stream": True,
    "store": False,
    "parallel_tool_calls": True,
    "tool_choice": "auto",
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "thread-1",
    "client_metadata": {"thread_id": "thread-1"},
    "reasoning": {"summary": "auto", "effort": "medium"},
    "text": {"verbosity": "low"},
    "tools": TOOLS,
    "input": FIRST,
}
TEMPLATE_WITHOUT_EFFORT = """
{%- for tool in tools or [] %}{{ tool | tojson }}{% endfor %}
{%- for message in messages %}[{{ message.role }}]{{ message.content or '' }}
{%- for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}{% endfor %}
{%- if add_generation_prompt %}[assistant]{% endif %}"""


@pytest.fixture
def engine():
    engine = ScriptedEngine(max_model_len=100_000)
    engine.text = ANSWER
    return engine


@pytest.fixture
def client(engine):
    with connected(engine) as client:
        yield client


def post(client, **more):
    response = client.http.post("/v1/responses", json={**BODY, **more})
    assert response.status_code == 200, response.text
    events = [json.loads(line[6:]) for line in response.text.splitlines() if line.startswith("data: ")]
    names = [line[7:] for line in response.text.splitlines() if line.startswith("event: ")]
    assert names == [event["type"] for event in events]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return response, events


def test_calls_go_back_under_the_names_that_the_client_gave(client):
    _, events = post(client)
    items = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    kept = ("type", "status", "name", "namespace", "arguments", "input")
    assert [{name: item[name] for name in kept if name in item} for item in items] == [
        {"type": "reasoning", "status": "completed"},
        {"type": "message", "status": "completed"},
        {"type": "function_call", "status": "completed", "name": "exec_command", "arguments": '{"cmd": "ls"}'},
        {"type": "function_call", "status": "completed", "name": "wait", "namespace": "agents", "arguments": "{}"},
        {"type": "custom_tool_call", "status": "completed", "name": "edit", "input": EDIT},
    ]
    assert items[0]["content"] == [{"type": "reasoning_text", "text": "hm"}]
    assert events[-1]["type"] == "response.completed"
    assert events[-1]["response"]["output"] == items
    usage = events[-1]["response"]["usage"]
    assert usage["input_tokens_details"].keys() == {"cached_tokens"}
    assert usage["output_tokens_details"].keys() == {"reasoning_tokens"}
    deltas = [event for event in events if event["type"] == "response.custom_tool_call_input.delta"]
    [done] = [event for event in events if event["type"] == "response.custom_tool_call_input.done"]
    assert "".join(event["delta"] for event in deltas) == done["input"] == EDIT
    assert {event["item_id"] for event in [*deltas, done]} == {items[-1]["id"]}


def test_the_streams_fold_is_the_whole_answer(engine, client):
    engine.text = ANSWER
    asked = {name: BODY[name] for name in ("model", "input", "tools", "reasoning", "text")}
    whole = client.responses.create(**asked)
    with client.responses.stream(**asked) as stream:
        for _ in stream:
            pass
        folded = stream.get_final_response()

    def said(response):
        return [
            item.model_dump(exclude={"id", "call_id", "parsed_arguments"}, exclude_none=True)
            for item in response.output
        ]

    assert [item.type for item in whole.output] == [
        "reasoning",
        "message",
        "function_call",
        "function_call",
        "custom_tool_call",
    ]
    assert said(folded) == said(whole)
    assert folded.usage == whole.usage


def test_the_model_sees_functions_only(engine, client):
    post(client)
    shown = [json.loads(line) for line in _objects(engine.prompt)]
    assert [tool["function"]["name"] for tool in shown] == ["exec_command", "agents__wait", "edit"]
    edit = shown[-1]["function"]
    assert edit["parameters"]["properties"].keys() == {"input"}
    assert edit["description"].startswith("Edits files.")
    assert GRAMMAR.strip() in edit["description"]
    assert engine.prompt.endswith("[user]Here is /tmp.[user]List it.[assistant]<medium>")


def test_what_has_no_effect_is_named(client):
    response, _ = post(client)
    assert response.headers["x-jaxis-ignored"].split(",") == [
        "client_metadata",
        "prompt_cache_key",
        "reasoning.summary",
        "text.verbosity",
        "tools.web_search",
        "tools.tool_search",
    ]


def test_an_effort_that_the_template_does_not_read_is_left_out():
    engine = ScriptedEngine(TEMPLATE_WITHOUT_EFFORT, max_model_len=100_000)
    engine.text = "Yes."
    with connected(engine, tool_call_parser="hermes") as client:
        response, events = post(client)
    assert "reasoning.effort" in response.headers["x-jaxis-ignored"].split(",")
    assert events[-1]["type"] == "response.completed"


def test_a_turn_with_calls_comes_back_as_one_message(engine, client):
    response, _ = post(client, input=LATER)
    turn = engine.prompt[engine.prompt.index("[assistant]") :]
    calls = [
        {"name": "exec_command", "arguments": {"cmd": "ls"}},
        {"name": "agents__wait", "arguments": {}},
        {"name": "edit", "arguments": {"input": EDIT}},
    ]
    assert turn == (
        "[assistant]<think>hm</think>I look."
        + "".join(f"<tool_call>{json.dumps(call)}</tool_call>" for call in calls)
        + "[tool]x.txt(for a)[tool]done(for b)[tool]edited(for c)[assistant]<medium>"
    )
    assert "input.web_search_call" in response.headers["x-jaxis-ignored"].split(",")


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        ('{"patch": "x"}', '{"patch": "x"}'),
        ('{"input": "*** Begin\\n+a', "*** Begin\n+a"),
    ],
)
def test_an_input_that_is_none_reaches_the_client_as_it_is(engine, client, text, arguments):
    """The tool says what is wrong with it; a call that was cut off says that it is incomplete."""
    cut = not text.endswith("}")
    engine.text = f'<tool_call>{{"name": "edit", "arguments": {text}' + ("" if cut else "}</tool_call>")
    engine.finish_reason = "length" if cut else "stop"
    _, events = post(client)
    [item] = events[-1]["response"]["output"]
    assert (item["input"], item["status"]) == (arguments, "incomplete" if cut else "completed")


def test_a_custom_tool_that_must_be_called_gets_text_of_its_grammar(engine, client):
    engine.text = EDIT
    _, events = post(client, tool_choice={"type": "custom", "name": "edit"})
    assert engine.params.structured_outputs.grammar == GRAMMAR
    [item] = events[-1]["response"]["output"]
    assert (item["type"], item["name"], item["input"], item["status"]) == (
        "custom_tool_call",
        "edit",
        EDIT,
        "completed",
    )
    engine.finish_reason = "length"
    _, events = post(client, tool_choice={"type": "custom", "name": "edit"})
    assert events[-1]["type"] == "response.incomplete"
    assert events[-1]["response"]["output"][0]["status"] == "incomplete"


def test_a_namespaced_function_can_be_demanded(engine, client):
    engine.text = '<tool_call>\n{"name": "agents__wait", "arguments": {}}\n</tool_call>'
    choice = {"type": "function", "name": "wait", "namespace": "agents"}
    _, events = post(client, tool_choice=choice)
    [item] = events[-1]["response"]["output"]
    assert (item["name"], item["namespace"]) == ("wait", "agents")


@pytest.mark.parametrize(
    ("item", "words"),
    [
        (
            {"type": "message", "role": "user", "content": [{"type": "input_image", "image_url": "data:x"}]},
            "does not support image input",
        ),
        (
            {"type": "function_call_output", "call_id": "a", "output": [{"type": "input_image", "image_url": "x"}]},
            "does not support image input",
        ),
        ({"type": "additional_tools", "tools": []}, "the type 'additional_tools' is not supported here"),
    ],
)
def test_an_unreadable_item_is_an_error_of_one_line(client, item, words):
    with pytest.raises(openai.BadRequestError, match=words) as caught:
        client.responses.create(model="jaxis-tiny", input=[*FIRST, item])
    assert caught.value.body["param"] == "input"


def _objects(prompt):
    """The JSON objects at the start of a prompt."""
    decoder, position = json.JSONDecoder(), 0
    while prompt[position] == "{":
        _, end = decoder.raw_decode(prompt, position)
        yield prompt[position:end]
        position = end


def test_an_input_of_nothing_but_what_has_no_effect_is_refused(client):
    items = [{"type": "image_generation_call"}, {"type": "reasoning", "summary": [], "content": []}]
    answer = client.http.post("/v1/responses", json={"model": "jaxis-tiny", "input": items})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "input")
