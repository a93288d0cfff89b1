"""/v1/messages through the `anthropic` client: what a scripted model says, whole and streamed alike."""

import json

import anthropic
import pytest

from tests.support.scripted_engine import TEMPLATE, ScriptedEngine, asking

WEATHER = {
    "name": "get_weather",
    "description": "Weather of a city",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
TIME = {"name": "get_time", "input_schema": {"type": "object", "properties": {}}}
CALLS = (
    '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>'
)
QUESTION = [{"role": "user", "content": "Weather?"}]


def client_of(http):
    return anthropic.Anthropic(base_url="http://testserver", api_key="none", http_client=http, max_retries=0)


@pytest.fixture(scope="module")
def shared_engine():
    return ScriptedEngine()


@pytest.fixture(scope="module")
def http(shared_engine):
    with asking(shared_engine) as http:
        yield http


@pytest.fixture
def engine(shared_engine):
    """The engine, which is as it was made once the test has ended."""
    made = dict(vars(shared_engine))
    yield shared_engine
    vars(shared_engine).update(made)


@pytest.fixture
def client(http, engine):
    return client_of(http)


def ask(client, **more):
    return client.messages.create(**{"model": "jaxis-tiny", "max_tokens": 100, "messages": QUESTION} | more)


def without_ids(message):
    told = message.model_dump(exclude={"id"})
    for block in told["content"]:
        if block["type"] == "tool_use":
            assert block.pop("id").startswith("toolu_")
        block.pop("parsed_output", None)
    return told


def both(client, **more):
    """An answer, seen to be the same whole and folded from its stream by the client."""
    whole = ask(client, **more)
    with client.messages.stream(**{"model": "jaxis-tiny", "max_tokens": 100, "messages": QUESTION} | more) as stream:
        folded = stream.get_final_message()
    assert without_ids(folded) == without_ids(whole)
    assert (whole.type, whole.role, whole.model) == ("message", "assistant", "jaxis-tiny")
    assert whole.id.startswith("msg_")
    return whole


def said(message):
    return [
        (block.type, getattr(block, {"text": "text", "thinking": "thinking", "tool_use": "input"}[block.type]))
        for block in message.content
    ]


@pytest.mark.parametrize("piece", [1, 2, 7, 50, 1000])
def test_thinking_text_and_calls_are_blocks(client, engine, piece):
    engine.text, engine.piece = f"<think>\nhm\n</think>\n\nI look.\n{CALLS}", piece
    message = both(client, tools=[WEATHER, TIME])
    assert said(message) == [
        ("thinking", "hm"),
        ("text", "I look."),
        ("tool_use", {"city": "Rome"}),
        ("tool_use", {}),
    ]
    assert message.content[0].signature
    assert (message.stop_reason, message.stop_sequence) == ("tool_use", None)
    assert len({block.id for block in message.content[2:]}) == 2


def test_events_come_in_their_order(client, engine):
    engine.text = f"<think>\nhm\n</think>\n\nI look.\n{CALLS}"
    events = list(ask(client, tools=[WEATHER, TIME], stream=True))
    kinds = [event.type for event in events]
    assert (kinds[0], kinds[-2:]) == ("message_start", ["message_delta", "message_stop"])
    assert (events[0].message.type, events[0].message.role, events[0].message.content) == ("message", "assistant", [])
    opened = None
    num_blocks = 0
    for event in events[1:-2]:
        if event.type == "content_block_start":
            assert (opened, event.index) == (None, num_blocks)
            opened, num_blocks = event.index, num_blocks + 1
        else:
            assert event.index == opened
            opened = None if event.type == "content_block_stop" else opened
    assert (opened, num_blocks) == (None, 4)
    thinking = [e.delta.type for e in events if e.type == "content_block_delta" and e.index == 0]
    assert thinking[-1] == "signature_delta"
    assert set(thinking[:-1]) == {"thinking_delta"}


@pytest.mark.parametrize(
    ("text", "finish_reason", "stop_reason", "expected", "content"),
    [
        ("Hello.", "stop", None, ("end_turn", None), [("text", "Hello.")]),
        ("Hel", "length", None, ("max_tokens", None), [("text", "Hel")]),
        ("Hello", "stop", "STOP", ("stop_sequence", "STOP"), [("text", "Hello")]),
        ("", "stop", None, ("end_turn", None), [("text", "")]),
        (" \n", "stop", None, ("end_turn", None), [("text", " \n")]),
        (" Hello", "stop", None, ("end_turn", None), [("text", " Hello")]),
        ("<think>hm", "length", None, ("max_tokens", None), [("thinking", "hm")]),
        (f"  \n{CALLS}\n ", "stop", None, ("tool_use", None), [("tool_use", {"city": "Rome"}), ("tool_use", {})]),
        (CALLS[:60], "length", None, ("max_tokens", None), [("tool_use", {})]),
        (CALLS[:60], "stop", "Rome", ("stop_sequence", "Rome"), [("tool_use", {})]),
        (CALLS[:60], "stop", None, ("end_turn", None), [("tool_use", {})]),
        (CALLS[:-15], "length", None, ("max_tokens", None), [("tool_use", {"city": "Rome"}), ("tool_use", {})]),
        ('<tool_call>{"name": "f", "arguments": [1]}</tool_call>', "stop", None, ("end_turn", None), None),
    ],
)
def test_why_an_answer_ended(client, engine, text, finish_reason, stop_reason, expected, content):
    engine.text, engine.finish_reason, engine.stop_reason = text, finish_reason, stop_reason
    message = both(client, tools=[WEATHER, TIME], stop_sequences=["STOP", "Rome"])
    assert (message.stop_reason, message.stop_sequence) == expected
    assert said(message) == (content or [("text", text)])  # a malformed call is text, and never a call


def test_usage_counts_what_was_not_cached(client, engine):
    engine.text, engine.num_cached_tokens = "<think>hm</think>Hello.", 5
    message = both(client)
    count = client.messages.count_tokens(model="jaxis-tiny", messages=QUESTION).input_tokens
    usage = message.usage
    assert (usage.input_tokens, usage.cache_read_input_tokens, usage.cache_creation_input_tokens) == (count - 5, 5, 0)
    assert usage.output_tokens == len(engine.text)


def test_no_tokens_at_all_fill_the_cache(client, engine):
    engine.text, engine.finish_reason = "H", "length"
    message = both(client, max_tokens=0)
    assert (message.content, message.stop_reason, message.usage.output_tokens) == ([], "max_tokens", 0)
    assert engine.params.max_tokens == 1


def test_parameters_arrive(client, engine):
    ask(client, stop_sequences=["A", "B"], max_tokens=7, extra_body={"temperature": 0.5, "top_p": 0.25, "top_k": 3})
    params = engine.params
    assert (params.stop, params.temperature, params.top_p, params.top_k) == (["A", "B"], 0.5, 0.25, 3)
    assert params.max_tokens == 7


def test_tool_choice(client, engine):
    engine.text = '<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>'
    message = both(client, tools=[WEATHER, TIME], tool_choice={"type": "any"})
    assert (said(message), message.stop_reason) == ([("tool_use", {})], "tool_use")
    several = engine.params.structured_outputs.grammar
    ask(client, tools=[WEATHER, TIME], tool_choice={"type": "any", "disable_parallel_tool_use": True})
    assert ")*" in several
    assert ")*" not in engine.params.structured_outputs.grammar
    ask(client, tools=[WEATHER, TIME], tool_choice={"type": "tool", "name": "get_time"})
    assert "get_time" in engine.params.structured_outputs.grammar
    assert "get_weather" not in engine.params.structured_outputs.grammar
    ask(client, tools=[WEATHER | {"strict": True}])
    assert "[lazy]" in engine.params.structured_outputs.grammar
    engine.text = CALLS
    choice = {"type": "auto", "disable_parallel_tool_use": True}
    assert said(both(client, tools=[WEATHER, TIME], tool_choice=choice)) == [("tool_use", {"city": "Rome"})]
    ask(client, tools=[WEATHER], tool_choice={"type": "none"})
    assert engine.params.structured_outputs is None
    assert "get_weather" not in engine.prompt


def test_tools_of_anthropic_itself_are_left_out(client, engine):
    search = {"type": "web_search_20250305", "name": "web_search", "max_uses": 5}
    raw = client.messages.with_raw_response.create(
        model="jaxis-tiny", max_tokens=9, messages=QUESTION, tools=[search, WEATHER]
    )
    assert raw.headers["x-jaxis-ignored"] == "tools.max_uses,tools.web_search_20250305"
    assert "web_search" not in engine.prompt
    assert "get_weather" in engine.prompt
    with pytest.raises(anthropic.BadRequestError, match="web_search_20250305"):
        ask(client, tools=[search, WEATHER], tool_choice={"type": "tool", "name": "web_search"})


@pytest.mark.parametrize("config", [{"output_config": {}}, {}])
def test_structured_output(client, engine, config):
    form = {"type": "json_schema", "schema": {"type": "object", "properties": {"a": {"type": "integer"}}}}
    engine.text = '{"a": 1}'
    ask(client, output_config={"format": form}) if config else ask(client, extra_body={"output_format": form})
    assert engine.params.structured_outputs.json_schema == form["schema"]


def test_a_round_of_tools_comes_back(client, engine):
    engine.text = f"<think>\nhm\n</think>\n\nI look.\n{CALLS}"
    answer = ask(client, tools=[WEATHER, TIME])
    first, second = answer.content[2:]
    results = [
        {"type": "text", "text": "Go on."},
        {"type": "tool_result", "tool_use_id": first.id, "content": "sun"},
        {
            "type": "tool_result",
            "tool_use_id": second.id,
            "content": [{"type": "text", "text": "noon"}],
            "is_error": True,
        },
        {"type": "text", "text": "Soon."},
    ]
    turns = [*QUESTION, {"role": "assistant", "content": answer.content}, {"role": "user", "content": results}]
    ask(client, messages=turns, tools=[WEATHER, TIME])
    ids = [block.id.replace("toolu_", "call_") for block in (first, second)]
    assert engine.prompt[engine.prompt.index("[assistant]") :] == (
        "[assistant]<think>hm</think>I look."
        '<tool_call>{"name": "get_weather", "arguments": {"city": "Rome"}}</tool_call>'
        '<tool_call>{"name": "get_time", "arguments": {}}</tool_call>'
        f"[tool]sun(for {ids[0]})[tool]noon(for {ids[1]})[user]Go on.\nSoon.[assistant]"
    )


def test_ids_of_the_models_own_making_come_back(http):
    from jaxis.server.anthropic.message_turns import own_call_id, tool_use_id

    for call_id in ("functions.get_weather:0", "abcde1234", "call_é", "call_" + "0" * 24):
        sent = tool_use_id(call_id)
        assert own_call_id(sent) == call_id
        assert sent.replace("_", "").replace("-", "").isalnum()
        assert sent.isascii()
    assert tool_use_id("functions.f:0") != tool_use_id("functions.f:0")
    assert own_call_id("toolu_01AbCdEf") == "toolu_01AbCdEf"


SHAPES = [
    [{"role": "user", "content": "Hello"}],
    [{"role": "user", "content": [{"type": "text", "text": "Hello"}]}],
    [{"role": "user", "content": [{"type": "text", "text": "Hello", "cache_control": {"type": "ephemeral"}}]}],
]


def test_shapes_of_the_same_content_are_the_same_prompt(client, engine):
    prompts = set()
    systems = [
        "Be brief.",
        [{"type": "text", "text": "Be brief."}],
        [{"type": "text", "text": "Be brief.\n<total_tokens>1234 tokens left</total_tokens>"}],
        [
            {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1.330.f8c; cc_entrypoint=cli;"},
            {"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral", "ttl": "1h"}},
        ],
        "x-anthropic-billing-header: cc_version=2.1.330.440; cc_entrypoint=cli;\nBe brief.",
    ]
    for messages in SHAPES:
        for system in systems:
            ask(client, messages=messages, system=system)
            prompts.add(engine.prompt)
    assert len(prompts) == 1
    assert engine.prompt.startswith("[system]Be brief.[user]Hello[assistant]")


def test_schemas_keep_the_order_of_their_keys(client, engine):
    schema = {"type": "object", "properties": {"z": {"type": "string"}, "a": {"enum": [2, 1]}}, "required": ["z", "a"]}
    ask(client, tools=[{"input_schema": schema, "name": "f"}])
    assert json.dumps(schema) in engine.prompt


def test_system_messages_may_stand_anywhere(client, engine):
    turns = [
        {"role": "user", "content": "A"},
        {"role": "system", "content": [{"type": "text", "text": "B"}]},
        {"role": "assistant", "content": "C"},
        {"role": "assistant", "content": [{"type": "text", "text": "D"}]},
        {"role": "system", "content": "E", "clear_at": "next_user_message", "output_config": {"effort": "low"}},
        {"role": "user", "content": "F"},
        {"role": "system", "content": "G", "clear_at": "next_user_message"},
    ]
    ask(client, messages=turns, system="S")
    assert engine.prompt.rstrip() == "[system]S[user]A[system]B[assistant]CD[user]F[system]G[assistant]"


def test_deferred_tools_stand_where_they_were_found(client, engine):
    deferred = {**TIME, "defer_loading": True}
    call = {"type": "tool_use", "id": "toolu_1", "name": "find_tools", "input": {"query": "time"}}
    found = [{"type": "tool_reference", "tool_name": "get_time"}]
    turns = [
        *QUESTION,
        {"role": "assistant", "content": [call]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "toolu_1", "content": found}]},
    ]
    engine.text = CALLS
    message = both(client, messages=turns, tools=[WEATHER, deferred])
    definition = (
        '{"type": "function", "function": {"name": "get_time", "parameters": {"type": "object", "properties": {}}}}'
    )
    head, _, rest = engine.prompt.partition("[user]")
    assert "get_time" not in head
    assert f"[tool]{definition}(for toolu_1)" in rest
    assert said(message)[1] == ("tool_use", {})
    ask(client, tools=[WEATHER, deferred], tool_choice={"type": "tool", "name": "get_time"})
    assert "get_time" not in engine.prompt


def test_tools_may_come_and_go_in_system_messages(client, engine):
    changes = [
        {"type": "tool_addition", "tool": {"type": "tool_definition", "definition": TIME}},
        {"type": "tool_removal", "tool": {"type": "tool_reference", "name": "get_weather"}},
    ]
    ask(client, messages=[*QUESTION, {"role": "system", "content": changes}], tools=[WEATHER])
    late = engine.prompt.partition("[system]")[2]
    assert '"name": "get_time"' in late
    assert "get_weather is not available" in late


def test_documents_and_search_results_are_text(client, engine):
    blocks = [
        {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "D1"}, "title": "T1"},
        {"type": "document", "source": {"type": "content", "content": [{"type": "text", "text": "D2"}]}},
        {"type": "search_result", "source": "S", "title": "T2", "content": [{"type": "text", "text": "D3"}]},
        {"type": "text", "text": "Q"},
    ]
    ask(client, messages=[{"role": "user", "content": blocks}])
    assert engine.prompt.startswith("[user]T1\nD1\nD2\nT2\nS\nD3\nQ[assistant]")


def test_prefill_goes_on_with_the_assistants_turn(client, engine):
    turns = [*QUESTION, {"role": "assistant", "content": [{"type": "text", "text": "The answer is"}]}]
    engine.text = " Paris."
    assert said(both(client, messages=turns)) == [("text", " Paris.")]
    assert engine.prompt == "[user]Weather?[assistant]The answer is"
    with pytest.raises(anthropic.BadRequestError, match="disable thinking"):
        ask(client, messages=turns, thinking={"type": "enabled", "budget_tokens": 1024})


def test_thinking_sets_the_templates_variables():
    engine = ScriptedEngine(TEMPLATE + "{{ enable_thinking }}/{{ thinking }}")
    with asking(engine) as http:
        client = client_of(http)
        for thinking, expected in (
            ({"type": "enabled", "budget_tokens": 1024}, "True/True"),
            ({"type": "disabled"}, "False/False"),
            ({"type": "adaptive", "display": "summarized"}, "/"),
        ):
            ask(client, thinking=thinking)
            assert engine.prompt.rpartition("]")[2].strip() == expected


def test_disabled_thinking_is_left_out(client, engine):
    engine.text = "<think>hm</think>Hello."
    assert said(both(client, thinking={"type": "disabled"})) == [("text", "Hello.")]


@pytest.mark.parametrize(("effort", "expected"), [("low", "low"), ("max", "high")])
def test_effort_is_the_templates_reasoning_effort(client, engine, effort, expected):
    ask(client, output_config={"effort": effort})
    assert engine.prompt.rstrip().endswith(f"<{expected}>")


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"messages": [{"role": "user", "content": [{"type": "audio"}]}]}, r"content\[0\]: .*audio"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "source": {"type": "base64", "data": ""}}]}]},
            "does not support image input",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "tool_use", "id": "a", "name": "f", "input": {}}]}]},
            "role",
        ),
        ({"messages": [{"role": "tool", "content": "a"}]}, "role"),
        (
            {"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "toolu_9"}]}]},
            r"messages\[0\].content\[0\].tool_use_id is 'toolu_9'",
        ),
        (
            {
                "messages": [
                    *QUESTION,
                    {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "f", "input": {}}]},
                ]
            },
            "tool_result",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "document", "source": {"type": "base64"}}]}]},
            "'base64'",
        ),
        ({"tools": [{"name": "f"}]}, r"tools\[0\]: input_schema is missing"),
        ({"tools": [{**TIME, "name": "a b"}]}, r"tools\[0\].name must be"),
        ({"tools": [{**TIME, "input_schema": {"type": "string"}}]}, r"tools\[0\].input_schema must be"),
        ({"tools": [TIME], "tool_choice": {"type": "tool", "name": "f"}}, "'f'"),
        ({"tools": [TIME], "tool_choice": {"type": "must"}}, "tool_choice"),
        ({"tool_choice": {"type": "any"}}, "tools is empty"),
        ({"thinking": {"type": "enabled", "budget_tokens": 5}}, "budget_tokens"),
        (
            {"output_config": {"format": {"type": "json_schema", "schema": {"type": "nonsense"}}}},
            "output_config.format",
        ),
        ({"stop_sequences": [""]}, "stop_sequences holds an empty string"),
        ({"extra_body": {"temperature": 3}}, "temperature"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"extra_body": {"mcp_servers": [{"name": "x"}]}}, "mcp_servers"),
        ({"extra_body": {"seed": 1}}, "seed"),
    ],
)
def test_what_cannot_be_honoured_is_refused(client, more, words):
    with pytest.raises(anthropic.BadRequestError, match=words) as caught:
        ask(client, **more)
    error = caught.value
    assert error.body["type"] == "error"
    assert error.body["error"]["type"] == "invalid_request_error"
    assert "\n" not in error.body["error"]["message"]
    assert error.request_id == error.body["request_id"] == error.response.headers["x-request-id"]


def test_other_errors_have_the_same_shape(http, client):
    for path, status, kind in (("/v1/messages/nothing", 404, "not_found_error"), ("/v1/messages", 405, None)):
        answer = http.get(path)
        assert answer.status_code == status
        assert answer.json()["error"]["type"] == (kind or "invalid_request_error")
        assert answer.headers["request-id"] == answer.json()["request_id"]
    assert http.post("/v1/messages", content=b"{").json()["error"]["type"] == "invalid_request_error"
    assert http.post("/v1/messages", content=b"x" * 9_000_000).json()["error"]["type"] == "request_too_large"
    assert http.post("/v1/chat/completions", content=b"{").json()["error"]["param"] is None
    with pytest.raises(anthropic.NotFoundError):
        ask(client, model="another")


def test_what_changes_nothing_is_accepted(client, engine):
    ignored = {
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "safeguards": [{"type": "dangerous_tool_use"}],
        "mcp_servers": [],
        "something_new": {"a": 1},
        "service_tier": "auto",
    }
    raw = client.messages.with_raw_response.create(
        model="jaxis-tiny",
        max_tokens=9,
        messages=QUESTION,
        metadata={"user_id": "u"},
        extra_body=ignored,
        extra_query={"beta": "true"},
        extra_headers={"anthropic-beta": "claude-code-20250219,unheard-of-2027-01-01"},
    )
    assert raw.headers["x-jaxis-ignored"] == "something_new"
    assert "request-id" in raw.headers


def test_claude_code_says_hello(http):
    assert http.head("/api/hello").status_code == 200


@pytest.mark.parametrize("size", [990, 999, 5000])
def test_a_prompt_that_is_too_long_says_so_in_the_words_of_the_protocol(client, engine, size):
    turns = [{"role": "user", "content": "x" * size}]
    count = client.messages.count_tokens(model="jaxis-tiny", messages=turns).input_tokens
    with pytest.raises(anthropic.BadRequestError) as caught:
        ask(client, messages=turns)
    assert caught.value.body["error"]["message"] == f"prompt is too long: {count} tokens > 1000 maximum"


def test_both_headers_bring_a_key(engine):
    with asking(engine, api_keys=("secret",)) as http:
        for key, works in (("secret", True), ("wrong", False), ("", False)):
            for header in ({"x-api-key": key}, {"authorization": f"Bearer {key}"}):
                answer = http.post("/v1/messages", headers=header, json={})
                assert answer.status_code == (400 if works else 401)
                if not works:
                    assert answer.json()["error"]["type"] == "authentication_error"
                    assert answer.headers["request-id"] == answer.json()["request_id"]
        both_given = {"x-api-key": "secret", "authorization": "Bearer other"}
        assert http.post("/v1/messages", headers=both_given, json={}).status_code == 400
        assert http.post("/v1/messages/count_tokens", json={}).status_code == 401
        assert http.head("/api/hello").status_code == 401


def test_browsers_of_allowed_origins_may_send_its_headers(engine):
    asked = "x-api-key, anthropic-version, anthropic-beta, anthropic-dangerous-direct-browser-access, content-type"
    with asking(engine, allowed_origins=("https://page.example",)) as http:
        headers = {"origin": "https://page.example", "access-control-request-headers": asked}
        answer = http.options("/v1/messages", headers={**headers, "access-control-request-method": "POST"})
    assert answer.status_code == 200


def test_count_tokens_is_the_usage_of_the_request(client, engine):
    fields = {"system": "Be brief.", "tools": [WEATHER], "thinking": {"type": "disabled"}, "messages": QUESTION}
    count = client.messages.count_tokens(model="jaxis-tiny", **fields).input_tokens
    assert count == ask(client, **fields).usage.input_tokens == len(engine.prompt_token_ids)
    engine.prompt = None
    client.messages.count_tokens(model="jaxis-tiny", **fields)
    assert engine.prompt is None


def test_count_tokens_counts_what_is_too_long(client, engine):
    question = [{"role": "user", "content": "x" * 2 * engine.info.max_model_len}]
    count = client.messages.count_tokens(model="jaxis-tiny", messages=question).input_tokens
    assert count > 2 * engine.info.max_model_len


def test_on_the_embedded_model(server):
    question = [{"role": "user", "content": "What is the capital of France?"}]
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0, timeout=60) as client:
        message = client.messages.create(model="jaxis-tiny", max_tokens=30, messages=question)
        assert "Paris" in message.content[0].text
        assert message.stop_reason == "end_turn"
        with client.messages.stream(model="jaxis-tiny", max_tokens=30, messages=question) as stream:
            assert "".join(stream.text_stream) == message.content[0].text
        count = client.messages.count_tokens(model="jaxis-tiny", messages=question).input_tokens
        assert count == message.usage.input_tokens + message.usage.cache_read_input_tokens


def test_a_client_that_leaves_ends_its_request(server):
    story = [{"role": "user", "content": "Tell me a story."}]
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0, timeout=60) as client:
        with client.messages.stream(model="jaxis-tiny", max_tokens=2000, messages=story) as stream:
            next(iter(stream.text_stream))
        server.wait_until_idle()
