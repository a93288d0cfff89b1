"""/v1/completions: each parameter's effect, against the engine's own answers."""

import dataclasses

import openai
import pytest
import tokenizers

from jaxis.engine.drafting.lookup import LookupDrafter
from jaxis.engine.opened_model import EMBEDDED_MODEL
from jaxis.prompts import tokenize_prompt
from tests.support.drafters import drafting

MODEL = "jaxis-tiny"
PROMPT = "The capital of France is"


@pytest.fixture(scope="module")
def expect(built_engine):
    """Runs the engine alone: a prompt and parameters to a RequestOutput."""
    engine = built_engine.engine

    def run(prompt=PROMPT, **params):
        prompt = tokenize_prompt(prompt, engine.tokenizer, "prompt")
        params = dataclasses.replace(built_engine.default_sampling_params, **{"max_tokens": 16} | params)
        state = engine.add_request("expected", prompt.token_ids, params, prompt=prompt.text)
        while not state.finished:
            engine.step()
        return state.output()

    outputs = {
        name: run(**params)
        for name, params in {
            "greedy": {},
            "eight": {"max_tokens": 8, "ignore_eos": True},
            "logprobs": {"max_tokens": 4, "ignore_eos": True, "logprobs": 3, "prompt_logprobs": 3},
            "biased": {"max_tokens": 4, "logit_bias": {300: 100.0}},
            "allowed": {"max_tokens": 4, "allowed_token_ids": [301, 302], "ignore_eos": True},
            "penalized": {"max_tokens": 12, "repetition_penalty": 3.0, "ignore_eos": True},
            "sampled": {"max_tokens": 12, "temperature": 1.3, "seed": 5, "top_k": 20, "min_p": 0.01, "n": 2},
        }.items()
    }
    outputs["other"] = run("Once upon a time", max_tokens=8)
    return outputs


def ask(client, **more):
    return client.completions.create(**{"model": MODEL, "prompt": PROMPT} | more)


def texts(answer):
    return [choice.text for choice in answer.choices]


def expected_texts(output):
    return [completion.text for completion in output.outputs]


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("greedy", {}),
        ("eight", {"max_tokens": 8, "extra_body": {"ignore_eos": True}}),
        ("biased", {"max_tokens": 4, "logit_bias": {"300": 100}}),
        ("allowed", {"max_tokens": 4, "extra_body": {"allowed_token_ids": [301, 302], "ignore_eos": True}}),
        ("penalized", {"max_tokens": 12, "extra_body": {"repetition_penalty": 3.0, "ignore_eos": True}}),
        (
            "sampled",
            {"max_tokens": 12, "temperature": 1.3, "seed": 5, "n": 2, "extra_body": {"top_k": 20, "min_p": 0.01}},
        ),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_answer_is_the_engines(expect, client, name, more, stream):
    answer = ask(client, stream=stream, **more)
    if stream:
        pieces = {}
        for chunk in answer:
            for choice in chunk.choices:
                pieces[choice.index] = pieces.get(choice.index, "") + choice.text
        assert [pieces[index] for index in sorted(pieces)] == expected_texts(expect[name])
    else:
        assert texts(answer) == expected_texts(expect[name])


@pytest.mark.parametrize("stream", [False, True])
def test_a_prediction_changes_nothing_but_the_count_of_guesses(expect, built_engine, client, stream):
    eight = expect["eight"].outputs[0].text
    more = {"ignore_eos": True, "prediction": {"type": "content", "content": eight}}
    options = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    with drafting(built_engine.engine, LookupDrafter(3, 16), 5):
        answer = ask(client, max_tokens=8, extra_body=more, **options)
        chunks = list(answer) if stream else [answer]
    assert "".join(choice.text for chunk in chunks for choice in chunk.choices) == eight
    assert chunks[-1].usage.completion_tokens == 8
    assert chunks[-1].usage.completion_tokens_details.accepted_prediction_tokens > 0


def test_top_p_of_nothing_is_greedy(expect, client):
    for seed in range(3):
        assert texts(ask(client, temperature=2, top_p=0, seed=seed)) == expected_texts(expect["greedy"])


def test_parameters_change_the_answer(expect):
    """So that the tests above can fail."""
    outputs = [expect[name].outputs[0].token_ids[:4] for name in ("eight", "biased", "allowed", "sampled")]
    assert len({tuple(token_ids) for token_ids in outputs}) == 4
    assert expect["penalized"].outputs[0].token_ids[:8] != expect["eight"].outputs[0].token_ids


def test_token_ids_as_prompt(expect, client):
    assert texts(ask(client, prompt=expect["greedy"].prompt_token_ids)) == expected_texts(expect["greedy"])


def test_batch_of_prompts_keeps_its_order(expect, client):
    answer = ask(client, prompt=["Once upon a time", PROMPT], n=2, max_tokens=8)
    eight = client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=8).choices[0].text
    assert texts(answer) == [expect["other"].outputs[0].text] * 2 + [eight] * 2
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    # Prompts count once each, whatever n is.
    assert answer.usage.prompt_tokens == sum(len(expect[name].prompt_token_ids) for name in ("greedy", "other"))


def test_batch_of_token_ids_streams(expect, client):
    prompts = [expect["other"].prompt_token_ids, expect["greedy"].prompt_token_ids]
    pieces = {0: "", 1: ""}
    for chunk in ask(client, prompt=prompts, max_tokens=8, stream=True):
        for choice in chunk.choices:
            pieces[choice.index] += choice.text
    assert pieces[0] == expect["other"].outputs[0].text
    assert expect["greedy"].outputs[0].text.startswith(pieces[1])


def test_logprobs(expect, client):
    [choice] = ask(client, max_tokens=4, logprobs=3, extra_body={"ignore_eos": True}).choices
    [completion] = expect["logprobs"].outputs
    got = choice.logprobs
    assert got.token_logprobs == pytest.approx(
        [entry[token].logprob for entry, token in zip(completion.logprobs, completion.token_ids, strict=True)], abs=1e-3
    )
    assert [max(top.values()) for top in got.top_logprobs] == pytest.approx(got.token_logprobs)
    assert "".join(got.tokens) == choice.text
    assert [choice.text[offset:][: len(token)] for offset, token in zip(got.text_offset, got.tokens, strict=True)] == (
        got.tokens
    )


def begins(tokenizer, token_ids, **options):
    """Number of whole characters that the tokens before each give."""
    prefixes = [tokenizer.decode(token_ids[:i], **options) for i in range(len(token_ids))]
    return [len(text.rstrip("\ufffd")) for text in prefixes]


@pytest.mark.sampled(6)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "prompt", [None, "é😀 capital", " <|im_start|>日本<|im_end|>", [[3066, 162, 245, 98], [127, 102]]]
)
@pytest.mark.parametrize("more", [{}, {"stop": ["本"]}, {"n": 2, "prompt_logprobs": 1}, {"skip_special_tokens": False}])
def test_text_offset_counts_characters_of_the_text(client, prompt, more, stream):
    tokenizer = tokenizers.Tokenizer.from_file(str(EMBEDDED_MODEL / "tokenizer.json"))
    mixed = {"structured_outputs": {"regex": "(é|😀|日|本| a){5}"}, "return_token_ids": True, **more}
    echoed = {"echo": True, "prompt": prompt} if prompt else {}
    answer = ask(client, max_tokens=30, temperature=1, logprobs=1, stream=stream, seed=3, extra_body=mixed, **echoed)
    choices = {}
    for choice in [choice for chunk in (answer if stream else [answer]) for choice in chunk.choices]:
        text, prompt_ids, ids, offsets = choices.get(choice.index, ("", [], [], []))
        choices[choice.index] = (
            text + choice.text,
            prompt_ids + (choice.model_extra.get("prompt_token_ids") or []),
            ids + (choice.model_extra.get("token_ids") or []),
            offsets + (choice.logprobs.text_offset if choice.logprobs else []),
        )
    assert len(choices) == (2 if isinstance(prompt, list) else 1) * more.get("n", 1)
    for text, prompt_ids, ids, offsets in choices.values():
        skips = {"skip_special_tokens": more.get("skip_special_tokens", True)}
        before = tokenizer.decode(prompt_ids, skip_special_tokens=False) if prompt else ""
        of_prompt = begins(tokenizer, prompt_ids, skip_special_tokens=False) if prompt else []
        assert offsets == of_prompt + [len(before) + place for place in begins(tokenizer, ids, **skips)]
        completion = tokenizer.decode(ids, **skips)
        assert text == before + (completion.partition("本")[0] if "stop" in more else completion)


def test_text_offset_counts_in_the_prompt_as_it_was_sent(client):
    """The tokenizer composes the letter and its accent."""
    [choice] = ask(client, prompt="e\u0301é capital", max_tokens=1, echo=True, logprobs=0).choices
    assert choice.logprobs.tokens[4] == " capital"
    assert choice.logprobs.text_offset[:5] == [0, 0, 2, 2, 3]


def test_prompt_that_ends_inside_a_character_is_echoed_up_to_it(client):
    prompt = [162, 245, 98, 127]  # 日, and the first half of é
    [choice] = ask(client, prompt=prompt, max_tokens=1, echo=True, logprobs=0, logit_bias={"102": 100}).choices
    assert (choice.text, choice.logprobs.text_offset) == ("日é", [0, 0, 0, 1, 1])
    assert texts(ask(client, prompt=prompt, max_tokens=0, echo=True)) == ["日\ufffd"]


@pytest.mark.parametrize("stream", [False, True])
def test_echo_with_logprobs_scores_the_prompt(expect, client, stream):
    """lm-eval asks for this."""
    prompt_ids = expect["logprobs"].prompt_token_ids
    answer = ask(client, prompt=prompt_ids, max_tokens=1, logprobs=3, echo=True, stream=stream)
    choices = [choice for chunk in answer for choice in chunk.choices] if stream else answer.choices
    logprobs = [value for choice in choices for value in choice.logprobs.token_logprobs]
    tokens = [token for choice in choices for token in choice.logprobs.tokens]
    assert "".join(choice.text for choice in choices).startswith(PROMPT)
    assert "".join(tokens).startswith(PROMPT)
    expected = [
        entry and entry[token] for entry, token in zip(expect["logprobs"].prompt_logprobs, prompt_ids, strict=True)
    ]
    assert logprobs[0] is None
    assert logprobs[1 : len(prompt_ids)] == pytest.approx([entry.logprob for entry in expected[1:]], abs=1e-3)
    assert len(logprobs) == len(prompt_ids) + 1


def test_echo_of_the_prompt_alone(client):
    answer = ask(client, max_tokens=0, echo=True, logprobs=1)
    assert texts(answer) == [PROMPT]
    assert answer.usage.completion_tokens == 0
    assert answer.choices[0].finish_reason == "length"
    assert "".join(answer.choices[0].logprobs.tokens) == PROMPT


def test_a_prompt_that_fills_the_context_can_be_scored(built_engine, client):
    context = built_engine.engine.max_model_len
    prompt = [7 + i % 90 for i in range(context)]
    whole = ask(client, prompt=prompt, max_tokens=0, echo=True, logprobs=0).choices[0].logprobs.token_logprobs
    part = ask(client, prompt=prompt[:-1], max_tokens=0, echo=True, logprobs=0).choices[0].logprobs.token_logprobs
    assert len(whole) == context
    assert whole[1:-1] == pytest.approx(part[1:], abs=1e-3)
    [last] = ask(client, prompt=prompt[:-1], max_tokens=1, logprobs=0, logit_bias={str(prompt[-1]): 100}).choices
    assert whole[-1] == pytest.approx(last.logprobs.token_logprobs[0], abs=1e-3)
    for more in ({"max_tokens": 2}, {"max_tokens": 0, "prompt": [*prompt, 7]}, {"prompt": "a b " * context}):
        with pytest.raises(openai.BadRequestError, match=f"maximum context length is {context} tokens") as caught:
            ask(client, **{"prompt": prompt, "echo": True} | more)
        assert "--max-model-len" not in str(caught.value), "it is the model's own limit"


def test_tokens_as_ids(expect, client):
    answer = ask(client, max_tokens=4, logprobs=0, extra_body={"return_tokens_as_token_ids": True, "ignore_eos": True})
    ids = [f"token_id:{token_id}" for token_id in expect["logprobs"].outputs[0].token_ids]
    assert answer.choices[0].logprobs.tokens == ids


def test_prompt_logprobs(expect, client):
    answer = ask(client, max_tokens=1, extra_body={"prompt_logprobs": 1})
    entries = answer.choices[0].model_extra["prompt_logprobs"]
    assert entries[0] is None
    for entry, expected, token_id in zip(
        entries[1:], expect["logprobs"].prompt_logprobs[1:], expect["logprobs"].prompt_token_ids[1:], strict=True
    ):
        assert entry[str(token_id)]["logprob"] == pytest.approx(expected[token_id].logprob, abs=1e-3)
        assert entry[str(token_id)]["rank"] == expected[token_id].rank


def test_min_tokens_and_stop_token_ids(expect, client):
    token_ids = expect["eight"].outputs[0].token_ids
    stop = {"stop_token_ids": [token_ids[1]], "ignore_eos": True}
    answer = ask(client, max_tokens=8, extra_body=stop)
    assert answer.usage.completion_tokens == token_ids.index(token_ids[1]) + 1
    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].model_extra["stop_reason"] == token_ids[1]
    longer = ask(client, max_tokens=8, extra_body={**stop, "min_tokens": 6})
    assert longer.usage.completion_tokens >= 6


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"best_of": 3}, "best_of"),
        ({"suffix": "x"}, "suffix"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"logprobs": 21}, "logprobs"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": {"a": 1}}, "prompt"),
        ({"extra_body": {"seed": 2**70}}, "seed"),
        ({"extra_body": {"messages": []}}, "messages"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(client, more, param):
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, **more)
    assert caught.value.body["param"] == param


def test_unknown_token_is_refused(client):
    with pytest.raises(openai.BadRequestError, match="99999"):
        ask(client, prompt=[1, 99999])
