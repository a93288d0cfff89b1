"""A feature of requests is written in one file and given to the engine: here, a token that the model reads as another.

The oracle is the model itself, over whole sequences in which that token was replaced.
"""

from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
import pytest

from jaxis import SamplingParams
from jaxis.engine.engine import LLMEngine
from jaxis.engine.execution.feature import RequestFeature
from jaxis.engine.execution.step_part import StepPart
from jaxis.errors import RequestError

PROMPT = [5, 100, 7, 8, 9, 100, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 100, 22, 23]
GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)


class Misreading(RequestFeature):
    """Requests whose model reads one token as another: `misread=(token, other)`."""

    name = "misread"

    def __init__(self):
        self.pairs = {}

    def begin(self):
        self.pairs.clear()

    def check(self, asked, num_prompt_tokens):
        if len(asked) != 2:
            raise RequestError("must be two tokens", param="misread")

    def mark(self, sequence, asked):
        sequence.identity = repr(asked).encode()
        self.pairs[sequence.seq_id] = asked

    def added(self, completion):
        if completion.sequence.seq_id in self.pairs:
            completion.records["misread"] = CountedReads(self.pairs[completion.sequence.seq_id][0])

    def ended(self, completion):
        self.pairs.pop(completion.sequence.seq_id, None)

    def part(self, entries):
        return MisreadPart(self) if any(entry.sequence.seq_id in self.pairs for entry in entries) else None


class CountedReads:
    def __init__(self, token):
        self._token = token

    def report(self, output, sequence, start):
        output.num_misread = sequence.token_ids(0, sequence.num_tokens - 1).count(self._token)


@dataclass(frozen=True)
class MisreadPart(StepPart):
    feature: Misreading

    @property
    def in_decodes(self):
        return self

    def sizes(self, shape):
        return {"misread_tokens": shape.num_tokens, "misread_as": shape.num_tokens}

    def pack(self, output, shape, packed):
        pairs = [self.feature.pairs.get(entry.sequence.seq_id, (-1, -1)) for entry in output.scheduled]
        of_rows = np.repeat(pairs, [entry.num_tokens for entry in output.scheduled], axis=0)
        packed[shape.fields["misread_tokens"]] = -1
        for name, values in zip(("misread_tokens", "misread_as"), of_rows.T, strict=True):
            packed[shape.fields[name]][: len(values)] = values

    def arguments(self, model, input_ids, fields):
        read = jnp.where(input_ids == fields["misread_tokens"], fields["misread_as"], input_ids)
        return {"inputs_embeds": model.decoder.embed(read)}


def expected(runner, prompt, token, other):
    """The most likely tokens after the prompt, where the model reads `other` for `token`."""
    token_ids = list(prompt)
    for _ in range(GREEDY.max_tokens):
        read = [other if each == token else each for each in token_ids]
        token_ids.append(int(runner.whole_logits(read, [len(read) - 1])[0].argmax()))
    return token_ids[len(prompt) :]


@pytest.fixture(scope="module")
def engine(shared_batching_llm):
    runner = shared_batching_llm.engine.runner
    return LLMEngine(
        runner.vllm_config, runner.programs, tokenizer=None, eos_token_ids=frozenset(), features=[Misreading()]
    )


def answers(engine, asked):
    """The outputs of requests that run side by side."""
    requests = [engine.add_request(f"{i}", PROMPT, GREEDY, misread=pair) for i, pair in enumerate(asked)]
    while engine.has_unfinished:
        engine.step()
    return [request.output() for request in requests]


def test_a_features_requests_and_others_get_their_own_answers_in_one_batch_and_from_the_prefix_cache(engine):
    [first] = expected(engine.runner, PROMPT, -1, -1)[:1]
    asked = [(), (100, 7), (first, 42), (100, 7)]
    wanted = [expected(engine.runner, PROMPT, *(pair or (-1, -1))) for pair in asked]
    assert len(set(map(tuple, wanted))) == 3
    for _ in range(2):  # the second time with cached prefixes
        outputs = answers(engine, asked)
        assert [output.outputs[0].token_ids for output in outputs] == wanted
    assert [output.num_cached_tokens for output in outputs] == [16] * 4
    reads = [(PROMPT + tokens)[:-1].count(token) for tokens, (token, _) in zip(wanted[1:], asked[1:], strict=True)]
    assert [output.outputs[0].num_misread for output in outputs[1:]] == reads
    assert not hasattr(outputs[0].outputs[0], "num_misread")
    assert not engine.runner.feature("misread").pairs


def test_blocks_are_not_shared_with_other_requests(engine):
    engine.reset()
    assert [answers(engine, [pair])[0].num_cached_tokens for pair in [(), (100, 7), (100, 8), ()]] == [0, 0, 0, 16]


def test_an_argument_is_refused_by_its_feature_or_without_it(engine, batching_llm):
    with pytest.raises(RequestError, match="misread must be two tokens"):
        answers(engine, [(1, 2, 3)])
    with pytest.raises(RequestError, match="the request has 'misread', which this engine was started without"):
        answers(batching_llm.engine, [(1, 2)])
    assert not engine.has_unfinished
