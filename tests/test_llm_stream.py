"""LLM.stream: its pieces add up to generate's answer, and it may be left or interleaved at any point."""

import gc

import pytest

from jaxis import SamplingParams
from jaxis.errors import RequestError

TEXT = "the cat reads"
PARAMS = SamplingParams(temperature=2.0, seed=5, max_tokens=30, logprobs=2)


def collect(stream):
    """Text, tokens, logprobs and reason of all pieces together."""
    pieces = list(stream)
    assert [piece.finish_reason for piece in pieces[:-1]] == [None] * (len(pieces) - 1)
    return (
        "".join(piece.text for piece in pieces),
        [token_id for piece in pieces for token_id in piece.token_ids],
        [entry for piece in pieces for entry in piece.logprobs or []],
        (pieces[-1].finish_reason, pieces[-1].stop_reason),
    )


def expected(llm, prompt, params):
    [completion] = llm.generate(prompt, params)[0].outputs
    reason = (completion.finish_reason, completion.stop_reason)
    return completion.text, completion.token_ids, completion.logprobs or [], reason


def test_pieces_add_up(llm):
    assert collect(llm.stream(TEXT, PARAMS)) == expected(llm, TEXT, PARAMS)


def test_pieces_come_one_by_one(llm):
    pieces = list(llm.stream(TEXT, PARAMS))
    assert [len(piece.token_ids) for piece in pieces] == [1] * 30
    assert {piece.num_prompt_tokens for piece in pieces} == {len(llm.tokenizer.encode(TEXT))}


def test_cumulative_logprob_grows_to_that_of_the_whole(llm):
    [output] = llm.generate(TEXT, PARAMS)[0].outputs
    sums = [piece.cumulative_logprob for piece in llm.stream(TEXT, PARAMS)]
    assert sums[-1] == output.cumulative_logprob < sums[0] < 0
    assert sums == sorted(sums, reverse=True)
    assert {piece.cumulative_logprob for piece in llm.stream(TEXT, SamplingParams(max_tokens=3))} == {None}


def test_no_piece_holds_part_of_a_stop_text(llm):
    text = expected(llm, TEXT, PARAMS)[0]
    params = SamplingParams(temperature=2.0, seed=5, max_tokens=30, stop=[text[5:12]])
    streamed = collect(llm.stream(TEXT, params))
    assert streamed == expected(llm, TEXT, params)
    assert streamed[0] == text[: text.index(text[5:12])]
    assert streamed[3] == ("stop", text[5:12])


def test_cached_tokens(llm):
    prompt = list(range(200, 240))
    assert [next(iter(list(llm.stream(prompt, PARAMS)))).num_cached_tokens for _ in range(2)] == [0, 32]


def test_conversation(llm):
    conversation = [{"role": "user", "content": TEXT}]
    [output] = llm.chat(conversation, PARAMS)
    assert collect(llm.stream(conversation, PARAMS))[1] == output.outputs[0].token_ids


def test_refusals(llm):
    with pytest.raises(RequestError, match="n=2"):
        llm.stream(TEXT, SamplingParams(n=2))
    with pytest.raises(RequestError, match="1100 tokens"):
        llm.stream([1] * 1100)
    with pytest.raises(RequestError, match="must be of type SamplingParams"):
        llm.stream(TEXT, {"temperature": 0})


@pytest.mark.parametrize("num_taken", [0, 1, 5])
def test_closing_early_aborts(llm, num_taken):
    stream = llm.stream(TEXT, PARAMS)
    for _ in range(num_taken):
        next(stream)
    assert llm.engine.has_unfinished
    stream.close()
    assert not llm.engine.has_unfinished
    assert collect(llm.stream(TEXT, PARAMS)) == expected(llm, TEXT, PARAMS)


def test_dropping_the_iterator_aborts(llm):
    for _ in llm.stream(TEXT, PARAMS):
        break
    llm.stream(TEXT, PARAMS)
    gc.collect()
    assert not llm.engine.has_unfinished


def test_two_streams_in_turns(batching_llm):
    other = SamplingParams(temperature=0, max_tokens=12)
    answers = expected(batching_llm, TEXT, PARAMS)[1], expected(batching_llm, [4, 5, 6], other)[1]
    streams = batching_llm.stream(TEXT, PARAMS), batching_llm.stream([4, 5, 6], other)
    tokens = [], []
    for _ in range(30):
        for stream, taken in zip(streams, tokens, strict=True):
            piece = next(stream, None)
            taken.extend(piece.token_ids if piece else [])
    assert tokens == answers


@pytest.mark.parametrize("which", ["llm", "batching_llm"])
def test_generate_while_a_stream_is_open(request, which):
    """With one request at a time the stream ends before generate begins; else they run side by side."""
    llm = request.getfixturevalue(which)
    long = SamplingParams(temperature=0, max_tokens=40)
    streamed, generated = expected(llm, TEXT, PARAMS), expected(llm, [9, 8, 7], long)
    stream = llm.stream(TEXT, PARAMS)
    first = next(stream)
    assert expected(llm, [9, 8, 7], long) == generated
    rest = collect(stream)
    assert (first.text + rest[0], first.token_ids + rest[1]) == streamed[:2]
