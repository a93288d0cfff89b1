"""Thinking that a client leaves out is restored, with the tokens that were generated, and never to anybody else."""

import dataclasses

import pytest

from benchmarks.restored_thinking import TEMPLATES, run, served_model
from jaxis import SamplingParams
from jaxis.outputs import CompletionOutput, RequestOutput
from jaxis.server.generation.answer_format import NO_TOOLS, AnswerFormat
from jaxis.server.generation.job import GenerationJob
from jaxis.server.generation.prompts import ChatPrompt
from jaxis.server.generation.restored_thinking import RestoredThinking, keeps_thinking
from tests.support.scripted_engine import ScriptedEngine, connected

KEEPS = TEMPLATES["keeps all thinking"]
MODEL = served_model(KEEPS)
QUESTION = {"role": "user", "content": "What is the capital of France?"}
TEXT = "<think>\nI know it.\n</think>\n\nParis."


def job_of(messages, model=MODEL, **more):
    prompts = ChatPrompt(messages=messages, **more)
    answer = AnswerFormat.of_chat(model, NO_TOOLS, None)
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
        {"model": dataclasses.replace(MODEL, variant=b"adapter")},
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
    memory = RestoredThinking()
    again, lengths = run(KEEPS, memory, 11, 40)
    assert not any(again)
    tokens = [answer.turn.token_ids for answer in memory._answers.values() if answer.turn is not None]
    assert len(tokens) == 1
    without, _ = run(KEEPS, RestoredThinking(max_answers=0), 11, 40)
    assert min(without) > 0
    assert len(lengths) == len(without)


def test_which_templates_keep_thinking():
    assert {name: keeps_thinking(served_model(template).tokenizer) for name, template in TEMPLATES.items()} == {
        "keeps all thinking": True,
        "keeps thinking since the last question": False,
        "keeps no thinking": False,
    }


def second_prompt(client, engine, *, stream=False, key=None):
    """What the model is asked in the second turn of a conversation whose first answer is sent back without thinking."""
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
