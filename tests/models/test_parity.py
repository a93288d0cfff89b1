"""Every family gives transformers' numbers, in every path."""

import itertools

import jax.numpy as jnp
import numpy as np
import pytest

from jaxis.bringup.verify.compare import GATES, kl_divergence, relative_error
from tests.support import parity
from tests.support.paged_sequences import PagedSequence, PagedSequences
from tests.support.parity import FAMILIES, PAGED_LENGTH, PROMPT_LENGTHS, Family, prompt

MAX_RELATIVE_ERROR = GATES["float32"].relative_error
MAX_BF16_KL_NATS = GATES["bfloat16"].mean_kl_nats

# By module: all tests of a family run before those of the next, which share its model.
families = pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name, scope="module")
some_families = pytest.mark.parametrize(
    "family",
    [f for f in FAMILIES if f.name in ("Llama 3", "Qwen3", "Mistral, window", "DeepSeek V3", "GPT-OSS", "Llama 4")],
    ids=lambda family: family.name,
    scope="module",
)


@families
def test_logits_and_every_layer_equal_transformers_on_whole_sequences(family: Family):
    for length in PROMPT_LENGTHS:
        assert parity.logits_error(family, length) < MAX_RELATIVE_ERROR
        assert parity.layer_error(family, length) < MAX_RELATIVE_ERROR


@families
def test_logits_equal_transformers_in_every_paged_path(family: Family):
    errors = {path: parity.path_error(family, path) for path in parity.PATHS}
    assert max(errors.values()) < MAX_RELATIVE_ERROR, errors


@families
def test_greedy_tokens_equal_transformers_generate(family: Family):
    assert parity.greedy_tokens(family, prompt(17)) == parity.reference_greedy_tokens(family, prompt(17))


@some_families
def test_a_sequence_alone_gives_the_same_as_in_a_flat_batch(family: Family):
    alone = parity.whole_run(family, (17,))[17][0]
    np.testing.assert_allclose(alone, parity.whole_run(family)[17][0], rtol=0, atol=1e-5 * np.abs(alone).max())


@some_families
def test_unequal_chunks_of_several_sequences_in_one_step_equal_transformers(family: Family):
    """Decodes, first chunks and later chunks of four sequences side by side, with no padding to spare."""
    paged = parity.paged_sequences(family)
    lengths = (PAGED_LENGTH, 97, 40, 13)
    prompts = [prompt(length) for length in lengths]
    sequences, logits = [PagedSequence() for _ in lengths], [[] for _ in lengths]
    rng = np.random.default_rng(1)
    for _ in itertools.count():
        waiting = [i for i, s in enumerate(sequences) if s.length < lengths[i]]
        if not waiting:
            break
        sizes = [min(int(rng.choice([1, 1, 3, 19, 37])), lengths[i] - sequences[i].length) for i in waiting]
        work = [
            (sequences[i], prompts[i][sequences[i].length :][:size]) for i, size in zip(waiting, sizes, strict=True)
        ]
        for i, rows in zip(waiting, paged.step(work, **parity.PADDING), strict=True):
            logits[i].append(rows)
    for length, rows in zip(lengths, logits, strict=True):
        expected = parity.reference_run(family, length)[0]
        assert relative_error(np.concatenate(rows), expected) < MAX_RELATIVE_ERROR


def test_steps_of_one_token_and_of_fewer_tokens_than_requests_equal_transformers():
    family = next(f for f in FAMILIES if f.name == "Qwen3")
    paged = PagedSequences(parity.loaded_model(family))
    tokens, expected = prompt(17), parity.reference_run(family, 17)[0]
    first, second = PagedSequence(), PagedSequence()
    rows = [paged.step([(first, [token])], pad_tokens=1, pad_requests=1)[0] for token in tokens[:9]]
    rows += [
        paged.step([(first, [token]), (second, [other])], pad_tokens=2, pad_requests=5)[0]
        for token, other in zip(tokens[9:], tokens, strict=False)
    ]
    assert relative_error(np.concatenate(rows), expected) < MAX_RELATIVE_ERROR


@some_families
def test_bfloat16_stays_close_to_float32(family: Family):
    """Or as close as the reference does: a rounded router's choice of another expert is no error of ours."""
    logits = parity.whole_run(family, dtype=jnp.bfloat16)[500][0]
    assert logits.dtype == np.float32
    expected = parity.reference_run(family, 500)[0]
    inherent = kl_divergence(parity.bfloat16_reference_logits(family, 500), expected).mean()
    assert kl_divergence(logits, expected).mean() < max(MAX_BF16_KL_NATS, 1.5 * inherent)
