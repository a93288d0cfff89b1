"""Checks of the embedded model: its answers word for word, alone, together, and on several devices."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import jax

from jaxis.doctor.check import Case, CheckFailed
from jaxis.llm import LLM
from jaxis.sampling_params import SamplingParams

ANSWERS = {
    "What is the capital of France?": "The capital of France is Paris.",
    "What is the opposite of hot?": "The opposite of hot is cold.",
    "What is 7 plus 5?": "7 + 5 = 12.",
    "What sound does a dog make?": "A dog says woof.",
    "What color is the sky?": "The sky is blue.",
    "Who are you?": "I am Tiny, the small demonstration model of jaxis. I know a few tables and nothing else.",
}
"""Greedy answers of the embedded model, in float32 and in bfloat16: each token is far likelier than others."""
_MAX_TOKENS = 32
_MOST_DEVICES = 8  # its attention heads


def model_cases() -> Iterator[Case]:
    """Yields checks of whole answers on this machine's devices."""
    yield Case("model", "answers of the embedded model, together and alone", functools.partial(_check_answers, 1))
    number = _devices_to_share()
    if number > 1:
        yield Case("model", f"its answers from {number} devices", functools.partial(_check_answers, number))


def _devices_to_share() -> int:
    number = 1
    while 2 * number <= min(len(jax.local_devices()), _MOST_DEVICES):
        number *= 2
    return number


def _check_answers(tensor_parallel_size: int) -> str:
    conversations = [[{"role": "user", "content": question}] for question in ANSWERS]
    params = SamplingParams(temperature=0.0, max_tokens=_MAX_TOKENS)
    with LLM(
        tensor_parallel_size=tensor_parallel_size, max_model_len=256, max_num_seqs=len(ANSWERS), show_progress=False
    ) as llm:
        together = [output.outputs[0] for output in llm.chat(conversations, params, use_tqdm=False)]
        alone = [llm.chat(each, params, use_tqdm=False)[0].outputs[0] for each in conversations]
    for question, expected, first, second in zip(ANSWERS, ANSWERS.values(), together, alone, strict=True):
        if first.text != expected:
            raise CheckFailed(f"{question!r} is answered with {first.text!r} instead of {expected!r}")
        if list(first.token_ids) != list(second.token_ids):
            raise CheckFailed(f"{question!r} is answered differently alone, with {second.text!r}")
    return f"{len(ANSWERS)} of {len(ANSWERS)} answers word for word, the same tokens together and alone"
