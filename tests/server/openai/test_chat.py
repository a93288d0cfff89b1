"""/v1/chat/completions through the `openai` client: the engine's own answer, whole and streamed alike."""

import openai
import pytest

from jaxis.engine.drafting.lookup import LookupDrafter
from jaxis.prompts import tokenize_chat
from tests.support.drafters import drafting

MODEL = "jaxis-tiny"
USAGE = {"include_usage": True}
MESSAGES = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture(scope="module")
def expected(built_engine):
    """The engine's greedy answer, computed before any server has the engine."""
    engine = built_engine.engine
    prompt = tokenize_chat(MESSAGES, engine.tokenizer)
    state = engine.add_request("expected", prompt.token_ids, built_engine.default_sampling_params)
    while not state.finished:
        engine.step()
    return state.output()


def ask(client, **more):
    return client.chat.completions.create(**{"model": MODEL, "messages": MESSAGES} | more)


def streamed(chunks):
    """Text, finish reasons and usage of a stream's chunks by choice."""
    texts, reasons, usage = {}, {}, None
    for chunk in chunks:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            texts[choice.index] = texts.get(choice.index, "") + (choice.delta.content or "")
            if choice.finish_reason:
                reasons[choice.index] = choice.finish_reason
    return texts, reasons, usage


def test_answer_is_the_engines(expected, client):
    answer = ask(client)
    [choice] = answer.choices
    assert choice.message.content == expected.outputs[0].text
    assert "Paris" in choice.message.content
    assert choice.finish_reason == "stop"
    assert answer.usage.prompt_tokens == len(expected.prompt_token_ids)
    assert answer.usage.completion_tokens == len(expected.outputs[0].token_ids)


def test_stream_adds_up_to_the_answer(expected, client):
    chunks = list(ask(client, stream=True, stream_options={"include_usage": True}))
    texts, reasons, usage = streamed(chunks)
    assert texts == {0: expected.outputs[0].text}
    assert reasons == {0: "stop"}
    assert usage.completion_tokens == len(expected.outputs[0].token_ids)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].choices == []
    assert len({chunk.id for chunk in chunks}) == 1


def test_answers_carry_the_engines_fingerprint(client, server):
    fingerprint = server.engine.info.fingerprint
    assert fingerprint.startswith("fp_")
    answers = [ask(client, max_tokens=2), *ask(client, max_tokens=2, stream=True)]
    answers += [client.completions.create(model=MODEL, prompt="Hi", max_tokens=1)]
    answers += client.completions.create(model=MODEL, prompt="Hi", max_tokens=1, stream=True)
    assert {answer.system_fingerprint for answer in answers} == {fingerprint}


def test_stream_without_usage_has_none(client):
    assert all(chunk.usage is None for chunk in ask(client, stream=True))


def test_several_answers_with_a_seed_are_the_same_whole_and_streamed(client):
    whole = ask(client, n=3, temperature=1.5, seed=7, max_tokens=8)
    texts = streamed(ask(client, n=3, temperature=1.5, seed=7, max_tokens=8, stream=True))[0]
    assert texts == {choice.index: choice.message.content for choice in whole.choices}
    assert sorted(texts) == [0, 1, 2]
    assert len(set(texts.values())) > 1


def test_logprobs(expected, client):
    [choice] = ask(client, logprobs=True, top_logprobs=3).choices
    content = choice.logprobs.content
    assert len(content) == len(expected.outputs[0].token_ids)
    for position in content:
        assert len(position.top_logprobs) == 3
        assert position.top_logprobs[0].logprob == max(top.logprob for top in position.top_logprobs)
        assert position.logprob == position.top_logprobs[0].logprob  # greedy
    spelled = b"".join(bytes(position.bytes) for position in content)
    assert spelled.decode().startswith(choice.message.content)


def test_stream_carries_every_logprob_once(expected, client):
    whole = ask(client, logprobs=True, top_logprobs=2).choices[0].logprobs.content
    chunks = ask(client, logprobs=True, top_logprobs=2, stream=True)
    parts = [p for c in chunks for choice in c.choices if choice.logprobs for p in choice.logprobs.content]
    assert [(p.token, p.bytes) for p in parts] == [(p.token, p.bytes) for p in whole]
    assert [p.logprob for p in parts] == pytest.approx([p.logprob for p in whole], abs=1e-3)


def test_max_tokens_and_stop(expected, client):
    text = expected.outputs[0].text
    cut = ask(client, max_completion_tokens=2)
    assert (cut.choices[0].finish_reason, cut.usage.completion_tokens) == ("length", 2)
    assert text.startswith(cut.choices[0].message.content)
    stopped = ask(client, stop=["Par"])
    assert stopped.choices[0].message.content == text[: text.index("Par")]
    assert stopped.choices[0].finish_reason == "stop"


def test_continue_final_message(client):
    messages = [*MESSAGES, {"role": "assistant", "content": "The capital of France is"}]
    [choice] = ask(client, messages=messages, extra_body={"continue_final_message": True, "echo": True}).choices
    assert choice.message.content.startswith("The capital of France is")
    assert "Paris" in choice.message.content


@pytest.mark.parametrize("stream", [False, True])
def test_a_prediction_changes_nothing_but_the_count_of_guesses(expected, client, http, built_engine, stream):
    prediction = {"type": "content", "content": [{"type": "text", "text": expected.outputs[0].text}]}
    with drafting(built_engine.engine, LookupDrafter(3, 16), 5):
        answer = ask(client, prediction=prediction, stream=stream, **({"stream_options": USAGE} if stream else {}))
        if stream:
            texts, _, usage = streamed(list(answer))
        else:
            texts, usage = {0: answer.choices[0].message.content}, answer.usage
        metrics = http.get("/metrics").text
    assert texts == {0: expected.outputs[0].text}
    assert usage.completion_tokens == len(expected.outputs[0].token_ids)
    details = usage.completion_tokens_details
    assert details.accepted_prediction_tokens > 0
    assert details.rejected_prediction_tokens < 5
    assert 'jaxis:spec_decode_num_accepted_tokens_per_pos_total{model_name="jaxis-tiny",position="0"}' in metrics


def test_content_in_parts_is_the_text(expected, client):
    messages = [{"role": "user", "content": [{"type": "text", "text": MESSAGES[0]["content"]}]}]
    assert ask(client, messages=messages).choices[0].message.content == expected.outputs[0].text


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"temperature": -1}, "temperature"),
        ({"top_p": -0.1}, "top_p"),
        ({"n": 129}, "n"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"stop": [""]}, "stop"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"99999999": 1}}, "logit_bias"),
        ({"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "http://x"}]}]}, "messages"),
        ({"extra_body": {"temprature": 1}}, "temprature"),
        ({"extra_body": {"length_penalty": 1.5}}, "length_penalty"),
        ({"extra_body": {"chat_template": "{{ 1 }}"}}, "chat_template"),
        ({"extra_body": {"chat_template_kwargs": {"chat_template": "x"}}}, "chat_template_kwargs"),
        ({"extra_body": {"min_tokens": 5}, "max_tokens": 3}, "min_tokens"),
        ({"extra_body": {"top_k": "5"}}, "top_k"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(client, more, param):
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, **more)
    assert caught.value.body["param"] == param
    assert param in caught.value.body["message"]
    assert "\n" not in caught.value.body["message"]


def test_another_model_is_not_found(client):
    with pytest.raises(openai.NotFoundError) as caught:
        ask(client, model="gpt-7")
    assert caught.value.code == "model_not_found"


def test_a_limit_beyond_the_context_is_shortened_to_it(expected, client):
    answer = ask(client, max_tokens=128_000)
    assert answer.choices[0].message.content == expected.outputs[0].text
