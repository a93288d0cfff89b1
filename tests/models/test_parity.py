"""Every family gives transformers' numbers, in every path."""

import itertools
from collections.abc import Collection

import jax.numpy as jnp
import numpy as np
import pytest

from jaxis.bringup.verify.compare import GATES, kl_divergence, relative_error
from tests.support import parity
from tests.support.paged_sequences import PagedSequence, PagedSequences
from tests.support.parity import EVERY_KIND, FAMILIES, PAGED_LENGTH, PROMPT_LENGTHS, SLOW_NAMES, Family, prompt

MAX_RELATIVE_ERROR = GATES["float32"].relative_error
MAX_BF16_KL_NATS = GATES["bfloat16"].mean_kl_nats


NAMES = {family.name for family in FAMILIES}
# One of each kind of state, and the others that have one of them.
STATE_NAMES = {"Qwen3.5", "Nemotron 3", "LFM2"}
SLOW_STATE_NAMES = {"Qwen3-Next", "Qwen3.5 MoE", "Granite 4", "Falcon-H1", "Bamba", "Mamba2", "LFM2 MoE", "LFM3"}


def each_of(names: Collection[str], slow_names: Collection[str] = ()) -> pytest.MarkDecorator:
    """By module: all tests of a family run before those of the next, which share its model."""
    rows = [
        pytest.param(family, marks=[pytest.mark.slow] if family.name in slow_names else [], id=family.name)
        for family in FAMILIES
        if family.name in names
    ]
    return pytest.mark.parametrize("family", rows, scope="module")


# Of the families of every kind, those whose kind no test below runs in paged steps each time.
QUICK_PATHS = {
    *("Llama 3", "Gemma 3n", "Phi-3, longrope", "Llama 4", "GLM-5.2", "MiMo V2 Flash", "Jamba", "Kimi Linear"),
    "IQuest-Coder Loop",
}

families = each_of(NAMES, NAMES - QUICK_PATHS)
# Of what differs between ways to run a family, all of it shows in the families of every kind.
families_of_every_kind = each_of(NAMES, NAMES - EVERY_KIND)
SOME_SLOW = {"Llama 3", "Qwen3", "Mistral, window", "Llama 4"}
# Of windows, sinks and experts, and of latents.
SOME_QUICK = {"GPT-OSS", "DeepSeek V3"}
some_families = each_of(SOME_QUICK | SOME_SLOW, SOME_SLOW)
families_with_states = each_of(STATE_NAMES | SLOW_STATE_NAMES, SLOW_STATE_NAMES)
slow_but_for_states = each_of(NAMES, NAMES - STATE_NAMES)


def test_names_of_quick_and_slow_rows_are_names_of_rows():
    assert NAMES >= SLOW_NAMES | EVERY_KIND | STATE_NAMES | SLOW_STATE_NAMES
    assert EVERY_KIND >= QUICK_PATHS


@pytest.mark.sampled(5)
@families_of_every_kind
def test_logits_and_every_layer_equal_transformers_on_whole_sequences(family: Family):
    for length in PROMPT_LENGTHS:
        assert parity.logits_error(family, length) < MAX_RELATIVE_ERROR
        assert parity.layer_error(family, length) < MAX_RELATIVE_ERROR


@families
def test_logits_equal_transformers_in_paged_paths(family: Family):
    paths = ["prefill", "shared prefix"] if family.name not in EVERY_KIND else parity.PATHS
    errors = {path: parity.path_error(family, path) for path in paths}
    assert max(errors.values()) < MAX_RELATIVE_ERROR, errors


@each_of(NAMES - EVERY_KIND, NAMES)
def test_logits_equal_transformers_in_chunks_and_token_by_token(family: Family):
    """Paths of the families whose others the test above runs."""
    errors = {path: parity.path_error(family, path) for path in ("chunks of 7", "token by token")}
    assert max(errors.values()) < MAX_RELATIVE_ERROR, errors


@pytest.mark.sampled  # equal logits of each step have equal greedy tokens
@families_of_every_kind
def test_greedy_tokens_equal_transformers_generate(family: Family):
    assert parity.greedy_tokens(family, prompt(17)) == parity.reference_greedy_tokens(family, prompt(17))


@families_with_states
def test_states_in_the_slot_equal_those_in_transformers_cache(family: Family):
    """After a prompt, which comes in chunks, and after each of some decodes."""
    tokens = prompt(45)
    paged, sequence = parity.paged_sequences(family), PagedSequence()
    paged.step([(sequence, tokens[:17])], **parity.PADDING)
    steps, references = [tokens[17:41], *([token] for token in tokens[41:])], [tokens[:41], *([t] for t in tokens[41:])]
    for step, expected in zip(steps, parity.reference_states(family, references), strict=True):
        paged.step([(sequence, step)], **parity.PADDING)
        found = paged.states(sequence)
        assert [len(states) for states in found] == [len(states) for states in expected]
        for layer, (states, (inputs, *recurrent)) in enumerate(zip(found, expected, strict=True)):
            # transformers keeps one input more than a convolution needs.
            for ours, theirs in zip(states, [inputs[-len(states[0]) :], *recurrent], strict=True):
                assert relative_error(ours, theirs) < MAX_RELATIVE_ERROR, (sequence.length, layer)


@slow_but_for_states
def test_a_prompt_in_chunks_of_any_size_equals_transformers(family: Family):
    """Around the chunks of 64 tokens in which states are computed."""
    length = 150
    expected = parity.reference_run(family, length)[0]
    errors = {
        chunk: relative_error(parity.chunked(family, prompt(length), chunk), expected) for chunk in (7, 63, 64, 65)
    }
    assert max(errors.values()) < MAX_RELATIVE_ERROR, errors


@pytest.mark.sampled
@slow_but_for_states
def test_a_hundred_greedy_tokens_equal_transformers_generate(family: Family):
    assert parity.greedy_tokens(family, prompt(17), 100) == parity.reference_greedy_tokens(family, prompt(17), 100)


@some_families
def test_a_sequence_alone_gives_the_same_as_in_a_flat_batch(family: Family):
    alone = parity.whole_run(family, (17,))[17][0]
    np.testing.assert_allclose(alone, parity.whole_run(family)[17][0], rtol=0, atol=1e-5 * np.abs(alone).max())


@some_families
def test_unequal_chunks_of_several_sequences_in_one_step_equal_transformers(family: Family):
    """Decodes, first chunks and later chunks of four sequences side by side, with no padding to spare."""
    paged = parity.paged_sequences(family)
    lengths = (PAGED_LENGTH, 87, 40, 13)
    prompts = [prompt(length) for length in lengths]
    sequences, logits = [PagedSequence() for _ in lengths], [[] for _ in lengths]
    rng = np.random.default_rng(1)
    for _ in itertools.count():
        waiting = [i for i, s in enumerate(sequences) if s.length < lengths[i]]
        if not waiting:
            break
        sizes = [min(int(rng.choice([1, 1, 3, 19, 25])), lengths[i] - sequences[i].length) for i in waiting]
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


@each_of({"Llama 3", "GPT-OSS", "DeepSeek V3", "Llama 4"}, {"GPT-OSS", "DeepSeek V3", "Llama 4"})
def test_bfloat16_stays_close_to_float32(family: Family):
    """Or as close as the reference does: a rounded router's choice of another expert is no error of ours."""
    logits = parity.whole_run(family, dtype=jnp.bfloat16)[500][0]
    assert logits.dtype == np.float32
    expected = parity.reference_run(family, 500)[0]
    inherent = kl_divergence(parity.bfloat16_reference_logits(family, 500), expected).mean()
    assert kl_divergence(logits, expected).mean() < max(MAX_BF16_KL_NATS, 1.5 * inherent)
