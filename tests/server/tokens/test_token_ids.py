"""`return_token_ids`, the seed and the timings of an answer, whole and streamed, with OpenAI's own client."""

import pytest

PROMPT = "The capital of France is"
MESSAGES = [{"role": "user", "content": "What is the capital of France? 🗼"}]
IDS = {"return_token_ids": True}


def joined(parts):
    return [token_id for part in parts for token_id in part]


def test_completions_return_the_ids_of_each_prompt_and_of_what_each_choice_says(client, server):
    engine = server.engine.tokenizer
    answer = client.completions.create(
        model="jaxis-tiny", prompt=[engine.encode(PROMPT), [5, 6, 7]], max_tokens=6, n=2, extra_body=IDS, temperature=0
    )
    prompts = [engine.encode(PROMPT), [5, 6, 7]]
    assert [choice.prompt_token_ids for choice in answer.choices] == [prompts[0]] * 2 + [prompts[1]] * 2
    for choice in answer.choices:
        assert 1 <= len(choice.token_ids) <= 6
        text = engine.decode(choice.token_ids, skip_special_tokens=True)
        assert text.startswith(choice.text)
        assert isinstance(choice.seed, int)
    # The ids, sent back, say the same: nothing was tokenized anew.
    again = client.completions.create(
        model="jaxis-tiny", prompt=answer.choices[0].prompt_token_ids, max_tokens=6, temperature=0, extra_body=IDS
    )
    assert again.choices[0].token_ids == answer.choices[0].token_ids


def test_a_stream_of_completions_has_every_token_once(client):
    request = {"model": "jaxis-tiny", "prompt": PROMPT, "max_tokens": 12, "temperature": 0, "extra_body": IDS}
    whole = client.completions.create(**request)
    chunks = list(client.completions.create(**request, stream=True))
    choices = [choice for chunk in chunks for choice in chunk.choices]
    assert joined(choice.token_ids for choice in choices) == whole.choices[0].token_ids
    assert [hasattr(choice, "prompt_token_ids") for choice in choices] == [True] + [False] * (len(choices) - 1)
    assert choices[0].prompt_token_ids == whole.choices[0].prompt_token_ids
    assert "".join(choice.text for choice in choices) == whole.choices[0].text


@pytest.mark.parametrize("n", [1, 2])
def test_a_stream_of_chat_has_every_token_once(client, server, n):
    request = {"model": "jaxis-tiny", "messages": MESSAGES, "max_tokens": 9, "seed": 3, "n": n, "extra_body": IDS}
    whole = client.chat.completions.create(**request)
    chunks = list(client.chat.completions.create(**request, stream=True))
    assert [hasattr(chunk, "prompt_token_ids") for chunk in chunks] == [True] + [False] * (len(chunks) - 1)
    assert chunks[0].prompt_token_ids == whole.prompt_token_ids
    rendered = server.engine.tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=True)
    assert whole.prompt_token_ids == server.engine.tokenizer.encode(rendered, add_special_tokens=False)
    for choice in whole.choices:
        parts = [
            each.token_ids
            for chunk in chunks
            for each in chunk.choices
            if each.index == choice.index and hasattr(each, "token_ids")
        ]
        assert joined(parts) == choice.token_ids
        assert len(choice.token_ids) > 0


def test_responses_have_the_ids_in_deltas_and_at_the_end(client):
    request = {"model": "jaxis-tiny", "input": "Hi", "max_output_tokens": 8, "temperature": 0, "extra_body": IDS}
    whole = client.responses.create(**request)
    events = list(client.responses.create(**request, stream=True))
    deltas = [event for event in events if event.type.endswith(".delta")]
    assert len(whole.token_ids) == whole.usage.output_tokens
    assert len(whole.prompt_token_ids) == whole.usage.input_tokens
    told = joined(event.token_ids for event in deltas)
    assert told == whole.token_ids[: len(told)]
    assert deltas
    assert events[-1].response.token_ids == whole.token_ids


def test_answers_that_do_not_ask_have_no_ids(http):
    answer = http.post("/v1/chat/completions", json={"messages": MESSAGES, "max_tokens": 2}).json()
    assert "prompt_token_ids" not in answer
    assert "token_ids" not in answer["choices"][0]


@pytest.mark.parametrize("n", [1, 3])
def test_the_seed_of_an_answer_repeats_it(client, n):
    request = {"model": "jaxis-tiny", "prompt": PROMPT, "max_tokens": 10, "temperature": 1.5, "n": n, "extra_body": IDS}
    drawn = client.completions.create(**request)
    other = client.completions.create(**request)
    repeated = client.completions.create(**request, seed=drawn.seed)
    assert drawn.seed != other.seed
    assert repeated.seed == drawn.seed
    assert [c.token_ids for c in repeated.choices] == [c.token_ids for c in drawn.choices]
    assert [c.token_ids for c in other.choices] != [c.token_ids for c in drawn.choices]
    last = [*client.completions.create(**request, seed=drawn.seed, stream=True)][-1]
    assert last.seed == drawn.seed


@pytest.mark.parametrize("with_usage", [False, True])
def test_timings_come_with_the_answer_and_with_a_streams_last_chunk(client, with_usage):
    request = {"model": "jaxis-tiny", "messages": MESSAGES, "max_tokens": 5}
    options = {"stream_options": {"include_usage": True}} if with_usage else {}
    chunks = list(client.chat.completions.create(**request, stream=True, **options))
    assert [hasattr(chunk, "timings") for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    whole = client.chat.completions.create(**request)
    for timings in (whole.timings, chunks[-1].timings):
        assert timings["prompt_n"] + timings["cache_n"] == whole.usage.prompt_tokens
        assert timings["predicted_n"] == 5
        assert timings["prompt_ms"] > 0
        assert timings["predicted_ms"] > 0
        assert 0 <= timings["draft_n_accepted"] <= timings["draft_n"]
    completion = client.completions.create(model="jaxis-tiny", prompt=PROMPT, max_tokens=3)
    assert completion.timings["predicted_n"] == 3
    response = client.responses.create(model="jaxis-tiny", input="Hi", max_output_tokens=4)
    assert response.timings["predicted_n"] == response.usage.output_tokens
    assert isinstance(response.seed, int)
