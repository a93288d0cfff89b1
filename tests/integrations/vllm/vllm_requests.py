"""Requests in vLLM's words and in jaxis', and their answers in a form that compares every bit."""

import functools

import numpy as np
from vllm import SamplingParams as VllmParams
from vllm.inputs import TokensPrompt
from vllm.sampling_params import StructuredOutputsParams

import jaxis
from jaxis.structured_outputs import StructuredOutputs

VOCAB_SIZE = 3000  # of the embedded model's 3072, those that are no special tokens
TINY_VOCAB_SIZE = 480  # the same of checkpoints of tests.support.tiny_checkpoints
REGEX = "[a-c]{2,5}(-[0-9]{1,3}){1,2}"
CHOICES = ["yes", "no", "perhaps not"]
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["a"],
    "additionalProperties": False,
}
BAD_WORDS = ["the", "cat", "is", "and", "in"]


class Case:
    """One request, for both.

    Attributes:
      prompt: Token ids, with a placeholder for each image.
      images: Images of the prompt.
      values: Sampling parameters that both call alike.
      regex, choice: A grammar; both None: none.
    """

    def __init__(self, prompt, *, images=(), regex=None, choice=None, **values):
        self.prompt, self.images, self.values, self.regex, self.choice = prompt, list(images), values, regex, choice

    @property
    def has_grammar(self):
        return bool(self.regex or self.choice)

    @property
    def vllm_prompt(self):
        return TokensPrompt(prompt_token_ids=self.prompt, **self._media)

    @property
    def jaxis_prompt(self):
        return {"prompt_token_ids": self.prompt, **self._media}

    @property
    def _media(self):
        return {"multi_modal_data": {"image": self.images}} if self.images else {}

    @property
    def vllm_params(self):
        grammar = None
        if self.has_grammar:
            grammar = StructuredOutputsParams(regex=self.regex, choice=self.choice)
        return VllmParams(**self.values, structured_outputs=grammar)

    @property
    def jaxis_params(self):
        grammar = StructuredOutputs(regex=self.regex, choice=self.choice) if self.has_grammar else None
        return jaxis.SamplingParams(**self.values, structured_outputs=grammar)

    def __repr__(self):
        return f"Case({len(self.prompt)} tokens, regex={self.regex!r}, choice={self.choice!r}, {self.values})"


def random_cases(number, seed, *, longest=60, most_tokens=24, vocab_size=VOCAB_SIZE):
    """Requests with random parameters, often several of them together; about a third begin like an earlier one."""
    random = np.random.default_rng(seed)
    cases = []
    for _ in range(number):
        prompt = random.integers(5, vocab_size, random.integers(1, longest)).tolist()
        if cases and random.random() < 0.35:
            earlier = cases[random.integers(len(cases))].prompt
            prompt = (earlier + prompt)[: longest + 20]
        cases.append(Case(prompt, **_random_values(random, most_tokens, vocab_size)))
    return cases


def _random_values(random, most_tokens, vocab_size):
    values = {"max_tokens": int(random.integers(1, most_tokens)), "temperature": 0.0}
    if random.random() < 0.7:
        values |= {"temperature": float(random.choice([0.3, 0.7, 1.0, 1.5])), "seed": int(random.integers(1 << 31))}
        chance = functools.partial(_maybe, random, 0.4)
        values |= chance(top_k=int(random.integers(1, 60))) | chance(top_p=float(random.uniform(0.2, 1)))
        values |= chance(min_p=float(random.uniform(0, 0.3)))
    chance = functools.partial(_maybe, random, 0.25)
    values |= chance(frequency_penalty=float(random.uniform(-2, 2)))
    values |= chance(presence_penalty=float(random.uniform(-2, 2)))
    values |= chance(repetition_penalty=float(random.uniform(0.7, 1.6)))
    ids = random.integers(5, vocab_size, 12).tolist()
    values |= chance(logit_bias={token_id: float(random.uniform(-50, 8)) for token_id in ids[:4]})
    values |= chance(logprobs=int(random.choice([0, 1, 5, 20])))
    values |= chance(prompt_logprobs=int(random.choice([0, 1, 20])))
    if (kind := random.random()) < 0.1:
        return values | {"regex": REGEX}
    if kind < 0.2:
        return values | {"choice": CHOICES}
    values |= chance(allowed_token_ids=sorted({*ids, *range(10, 60)}))
    values |= chance(bad_words=[str(random.choice(BAD_WORDS))])
    values |= chance(stop_token_ids=random.integers(5, 400, 8).tolist())
    if random.random() < 0.4:
        values |= {"ignore_eos": True}
    elif random.random() < 0.3:
        values |= {"min_tokens": int(random.integers(0, values["max_tokens"] + 1))}
    return values


def _maybe(random, probability, **value):
    return value if random.random() < probability else {}


def vllm_answers(llm, cases):
    """The answers of vllm.LLM to all of them, given at once."""
    outputs = llm.generate([case.vllm_prompt for case in cases], [case.vllm_params for case in cases], use_tqdm=False)
    return [answer(output) for output in outputs]


def jaxis_answers(llm, cases):
    """The answers of jaxis.LLM."""
    outputs = llm.generate([case.jaxis_prompt for case in cases], [case.jaxis_params for case in cases])
    return [answer(output) for output in outputs]


def answer(output):
    """Tokens, why they end, and every log-probability with its rank, of an output of either."""
    [completion] = output.outputs
    return (
        list(completion.token_ids),
        completion.finish_reason,
        _scores(completion.logprobs),
        _scores((output.prompt_logprobs or [])[1:]),
    )


def _scores(positions):
    return [sorted((token_id, each.logprob, each.rank) for token_id, each in at.items()) for at in positions or ()]
