"""Packages that others build on: a whole answer, its stream, a call of a tool and a structured answer with each."""

import asyncio
import functools
import json
import operator

import pytest
from pydantic import BaseModel

from tests.support.scripted_engine import ScriptedEngine, served

pytestmark = pytest.mark.client
TEXT = "It is Paris."
CALL = '<tool_call>{"name": "add", "arguments": {"a": 2, "b": 40}}</tool_call>'
PERSON = '{"name": "Ann", "age": 41}'
DEMANDED_CALL = f'[{{"name": "Person", "parameters": {PERSON}}}]'  # as the grammar of a demanded call has it


class Person(BaseModel):
    """A person."""

    name: str
    age: int


def add(a: int, b: int) -> int:
    """Adds numbers."""
    return a + b


@pytest.fixture(scope="module")
def server():
    """The engine, and the address of its server."""
    engine = ScriptedEngine(max_model_len=100_000)
    with served(engine) as url:
        yield engine, url


@pytest.fixture
def engine(server):
    engine, _ = server
    engine.answers, engine.text = [], TEXT
    return engine


@pytest.fixture
def url(server):
    return server[1]


def check_langchain(engine, model, structured_answer, **structured):
    assert model.invoke("What is the capital of France?").content == TEXT
    assert functools.reduce(operator.add, model.stream("What is the capital of France?")).text == TEXT
    engine.text = CALL
    [call] = model.bind_tools([add]).invoke("What is 2 + 40?").tool_calls
    assert (call["name"], call["args"]) == ("add", {"a": 2, "b": 40})
    assert '"name": "add"' in engine.prompt
    engine.text = structured_answer
    assert model.with_structured_output(Person, **structured).invoke("Who?") == Person(name="Ann", age=41)


def test_langchain_openai(engine, url):
    package = pytest.importorskip("langchain_openai")
    settings = {"base_url": f"{url}/v1", "api_key": "none", "model": "jaxis-tiny"}
    check_langchain(engine, package.ChatOpenAI(**settings), PERSON, method="json_schema")
    assert engine.grammar is not None
    engine.text = TEXT
    assert package.ChatOpenAI(**settings, use_responses_api=True).invoke("What is the capital of France?").text == TEXT


def test_langchain_anthropic(engine, url):
    package = pytest.importorskip("langchain_anthropic")
    model = package.ChatAnthropic(base_url=url, api_key="none", model="jaxis-tiny", max_tokens=100)
    check_langchain(engine, model, DEMANDED_CALL)
    assert engine.grammar is not None


def test_langchain_ollama(engine, url):
    package = pytest.importorskip("langchain_ollama")
    check_langchain(engine, package.ChatOllama(base_url=url, model="jaxis-tiny"), PERSON, method="json_schema")
    assert engine.grammar is not None


@pytest.mark.parametrize(
    ("provider", "path"), [("openai", "/v1"), ("anthropic", ""), ("ollama_chat", "")], ids=lambda value: value
)
def test_litellm(engine, url, provider, path, monkeypatch):
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # it would ask the network
    litellm = pytest.importorskip("litellm")
    settings = {"model": f"{provider}/jaxis-tiny", "api_base": url + path, "api_key": "none", "max_tokens": 100}
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    assert litellm.completion(messages=messages, **settings).choices[0].message.content == TEXT
    chunks = litellm.completion(messages=messages, stream=True, **settings)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == TEXT
    engine.text = CALL
    parameters = {"type": "object", "properties": {name: {"type": "integer"} for name in "ab"}}
    tools = [{"type": "function", "function": {"name": "add", "parameters": parameters}}]
    [call] = litellm.completion(messages=messages, tools=tools, **settings).choices[0].message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("add", {"a": 2, "b": 40})


def test_instructor(engine, url):
    instructor = pytest.importorskip("instructor")
    import openai

    plain = openai.OpenAI(base_url=f"{url}/v1", api_key="none")
    question = {"model": "jaxis-tiny", "response_model": Person, "messages": [{"role": "user", "content": "Who?"}]}
    for mode, engine.text in ((instructor.Mode.JSON_SCHEMA, PERSON), (instructor.Mode.TOOLS, DEMANDED_CALL)):
        engine.grammar = None
        client = instructor.from_openai(plain, mode=mode)
        person = client.chat.completions.create(**question)
        assert isinstance(person, Person)  # of a class made of it
        assert person.model_dump() == json.loads(PERSON)
        assert engine.grammar is not None


def test_pydantic_ai(engine, url):
    pydantic_ai = pytest.importorskip("pydantic_ai")
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    model = OpenAIChatModel("jaxis-tiny", provider=OpenAIProvider(base_url=f"{url}/v1", api_key="none"))
    engine.answers = [CALL]
    agent = pydantic_ai.Agent(model, tools=[add])
    assert agent.run_sync("What is 2 + 40?").output == TEXT
    assert "42" in engine.prompt  # what the function returned

    async def stream():
        async with pydantic_ai.Agent(model).run_stream("What is the capital of France?") as result:
            return [text async for text in result.stream_text(delta=True)]

    assert "".join(asyncio.run(stream())) == TEXT
