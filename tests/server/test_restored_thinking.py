"""Thinking that a client leaves out is restored, with the tokens that were generated, and never to anybody else."""

import copy
import dataclasses
import json
from pathlib import Path

import pytest

import jaxis
from jaxis import SamplingParams
from jaxis.outputs import CompletionOutput, RequestOutput
from jaxis.parsing.model_parsers import ModelParsers
from jaxis.server.generation.answer_format import NO_TOOLS, AnswerFormat, choose_tools
from jaxis.server.generation.job import GenerationJob
from jaxis.server.generation.prompts import ChatPrompt
from jaxis.server.generation.restored_thinking import RestoredThinking, keeps_thinking
from jaxis.server.generation.served_model import ServedModel
from jaxis.tokenizer import Tokenizer
from tests.support.scripted_engine import ScriptedEngine, connected

_TURN = "<|im_start|>{{ m.role }}\n"
_CALLS = (
    "{% for call in m.tool_calls or [] %}{{ '\n' }}<tool_call>{{ '\n' }}"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}\n'
    "</tool_call>{% endfor %}"
)
_TOOLS = "{% for tool in tools or [] %}{{ tool | tojson }}\n{% endfor %}"
_THINKING = "<think>\n{{ m.reasoning_content }}\n</think>\n\n"
_END = (
    "{{ m.content or '' }}" + _CALLS + "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% endif %}"
)
_QUESTION = (
    "{% set state = namespace(question=0) %}{% for m in messages %}{% if m.role == 'user' %}"
    "{% set state.question = loop.index0 %}{% endif %}{% endfor %}"
)
TEMPLATES = {
    "keeps all thinking": _TOOLS
    + "{% for m in messages %}"
    + _TURN
    + "{% if m.reasoning_content %}"
    + _THINKING
    + "{% endif %}"
    + _END,
    "keeps thinking since the last question": _TOOLS
    + _QUESTION
    + "{% for m in messages %}"
    + _TURN
    + "{% if m.reasoning_content and loop.index0 > state.question %}"
    + _THINKING
    + "{% endif %}"
    + _END,
    "keeps no thinking": _TOOLS + "{# <think> #}{% for m in messages %}" + _TURN + _END,
}
FUNCTION = {"name": "read_file", "parameters": {"type": "object", "properties": {"path": {"type": "string"}}}}


def served_model(template):
    """A model with the embedded model's tokenizer and another chat template."""
    tokenizer = copy.copy(Tokenizer.from_path(Path(jaxis.__file__).parent / "assets" / "tiny"))
    tokenizer.chat_templates = {"default": template}
    return ServedModel(
        names=("model",),
        tokenizer=tokenizer,
        default_sampling_params=SamplingParams(),
        grammar_compiler=None,
        parsers=ModelParsers.select(tokenizer, None, tool="hermes", reasoning="deepseek_r1"),
    )


KEEPS = TEMPLATES["keeps all thinking"]
MODEL = served_model(KEEPS)
QUESTION = {"role": "user", "content": "What is the capital of France?"}
TEXT = "<think>\nI know it.\n</think>\n\nParis."


def job_of(messages, model=MODEL, tools=NO_TOOLS, **more):
    prompts = ChatPrompt(messages=messages, **more)
    answer = AnswerFormat.of_chat(model, tools, None)
    return GenerationJob(request_id="a", model=model, prompts=prompts, params=SamplingParams(), answer=answer)


def answered(memory, client="key ada", text=TEXT, **more):
    """Answers the question, in two parts as a stream has them; returns the tokens of prompt and answer."""
    job = job_of([QUESTION], **more)
    [prompt] = memory.tokenize(job, client)
    token_ids = MODEL.tokenizer.encode(text + "<|im_end|>", add_special_tokens=False)
    listener = memory.listen(job, prompt, client)
    parts = [CompletionOutput(0, text[:9], token_ids[:4]), CompletionOutput(0, text[9:], token_ids[4:])]
    parts[1].finish_reason = "stop"
    for part in parts:
        listener.add(RequestOutput("a", None, [], None, [part], finished=part.finished))
    return [*prompt.token_ids, *token_ids]


def next_prompt(memory, client="key ada", said="Paris.", model=MODEL, **more):
    messages = [QUESTION, {"role": "assistant", "content": said}, QUESTION]
    [prompt] = memory.tokenize(job_of(messages, model, **more), client)
    return prompt


def test_the_next_turn_has_the_thinking_and_the_tokens_of_the_last():
    memory = RestoredThinking()
    tokens = answered(memory)
    assert "<think>\nI know it.\n</think>\n\n Paris. " in next_prompt(memory, said=" Paris. ").text
    prompt = next_prompt(memory)
    assert "<think>\nI know it.\n</think>" in prompt.text
    assert list(prompt.token_ids[: len(tokens)]) == tokens
    assert MODEL.tokenizer.decode(prompt.token_ids, skip_special_tokens=False) == prompt.text
    own = {"role": "assistant", "content": "Paris.", "reasoning_content": "Mine."}
    [kept] = memory.tokenize(job_of([QUESTION, own, QUESTION]), "key ada")
    assert "Mine." in kept.text
    assert "I know it." not in kept.text


@pytest.mark.parametrize(
    "other",
    [
        {"client": "key bob"},
        {"client": None},
        {"said": "Lyon."},
        {"cache_salt": "another"},
        {"model": dataclasses.replace(MODEL, names=("other",))},
        {"model": dataclasses.replace(MODEL, adapter=b"adapter")},
        {"model": served_model(TEMPLATES["keeps no thinking"])},
        {"model": served_model(TEMPLATES["keeps thinking since the last question"])},
    ],
)
def test_nobody_else_and_nothing_else_gets_it(other):
    memory = RestoredThinking()
    answered(memory)
    assert "I know it." not in next_prompt(memory, **other).text


def test_one_that_is_off_remembers_nothing_and_memory_is_bounded():
    off = RestoredThinking(max_answers=0)
    assert off.listen(job_of([QUESTION]), off.tokenize(job_of([QUESTION]), "a")[0], "a") is None
    memory = RestoredThinking(max_answers=3, max_bytes=10**9)
    for number in range(9):
        answered(memory, client=f"key {number}")
    assert len(memory) == 3
    assert "I know it." in next_prompt(memory, client="key 8").text
    assert "I know it." not in next_prompt(memory, client="key 5").text
    small = RestoredThinking(max_bytes=2000)
    for number in range(9):
        answered(small, client=f"key {number}")
    assert 0 < len(small) < 4
    assert 0 < small.num_bytes <= 2000


def test_a_later_turn_has_the_tokens_of_those_before():
    """So a conversation takes the memory of its tokens once, and its first thinking stays as long as the last."""
    memory, forgetful = RestoredThinking(), RestoredThinking(max_answers=0)
    tools = choose_tools(MODEL, {"tools[0].function": FUNCTION}, "auto")
    messages, last = [QUESTION], None
    for number in range(11):
        job = job_of(messages, tools=tools)
        [prompt] = memory.tokenize(job, "client")
        if last is not None:
            assert list(prompt.token_ids[: len(last)]) == last
            assert list(forgetful.tokenize(job, "client")[0].token_ids[: len(last)]) != last
        answer, after, call_text = {"role": "assistant", "content": f"The answer {number}."}, QUESTION, ""
        if number % 2:
            call = {"name": "read_file", "arguments": {"path": f"file {number}"}}
            answer["tool_calls"] = [{"id": f"call{number:05}", "type": "function", "function": call}]
            after = {"role": "tool", "tool_call_id": f"call{number:05}", "name": "read_file", "content": "Two values."}
            call_text = f"\n<tool_call>\n{json.dumps(call)}\n</tool_call>"
        # A model does not always sample the tokens into which a tokenizer splits its text.
        parts = (f"<think>\nI think {number} ti", f"mes.\n</think>\n\n{answer['content']}{call_text}", "<|im_end|>")
        token_ids = [token for part in parts for token in MODEL.tokenizer.encode(part, add_special_tokens=False)]
        completion = CompletionOutput(0, "".join(parts[:-1]), token_ids, finish_reason="stop")
        memory.listen(job, prompt, "client").add(RequestOutput("a", None, [], None, [completion], finished=True))
        messages, last = [*messages, answer, after], [*prompt.token_ids, *token_ids]
    assert len([1 for each in memory._answers.values() if each.turn is not None]) == 1


def test_which_templates_keep_thinking():
    assert {name: keeps_thinking(served_model(template).tokenizer) for name, template in TEMPLATES.items()} == {
        "keeps all thinking": True,
        "keeps thinking since the last question": False,
        "keeps no thinking": False,
    }


def second_prompt(client, engine, *, stream=False, key=None):
    """The second prompt of a conversation whose first answer is sent back without thinking."""
    engine.answers = ["<think>I know it.</think>Paris."]
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    answer = client.chat.completions.create(model="m", messages=[QUESTION], stream=stream, extra_headers=headers)
    said = (
        "".join(chunk.choices[0].delta.content or "" for chunk in answer if chunk.choices)
        if stream
        else answer.choices[0].message.content
    )
    assert said == "Paris."
    return lambda **more: (
        client.chat.completions.create(
            model="m", messages=[QUESTION, {"role": "assistant", "content": said}, QUESTION], **more
        )
        and engine.prompt
    )


@pytest.mark.parametrize("stream", [False, True])
def test_a_server_restores_it_whole_or_streamed(stream):
    engine = ScriptedEngine()
    with connected(engine, served_model_names=("m",), reasoning_parser="deepseek_r1") as client:
        assert "<think>I know it.</think>Paris." in second_prompt(client, engine, stream=stream)()


def test_a_server_without_it_and_another_key():
    engine = ScriptedEngine()
    settings = {"served_model_names": ("m",), "reasoning_parser": "deepseek_r1"}
    with connected(engine, restore_thinking=False, **settings) as client:
        assert "I know it." not in second_prompt(client, engine)()
    with connected(engine, api_keys=("one", "two"), **settings) as client:
        ask = second_prompt(client, engine, key="one")
        assert "I know it." not in ask(extra_headers={"Authorization": "Bearer two"})
        assert "I know it." in ask(extra_headers={"Authorization": "Bearer one"})
