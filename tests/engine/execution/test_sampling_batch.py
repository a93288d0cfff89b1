"""The host side of sampling: preparing requests, packing their parameters."""

import jax
import numpy as np
import pytest

from jaxis.engine.execution.sampling_batch import SamplerFeatures, SamplingArrays, build_sampling_batch
from jaxis.engine.execution.sampling_packer import SamplingPacker
from jaxis.engine.execution.sequence_sampling import (
    SequenceSampling,
    draw_seed,
    sequence_seed,
    tokenize_bad_words,
    validate_for_vocab,
)
from jaxis.errors import RequestError
from jaxis.sampling_params import MIN_TEMPERATURE, SamplingParams

V = 1000


def request(params=None, *, prompt=(), output=None, seed=1, vocab_size=V, **kwargs):
    return SequenceSampling(
        params or SamplingParams(),
        prompt_token_ids=prompt,
        output_token_ids=[] if output is None else output,
        vocab_size=vocab_size,
        seed=seed,
        **kwargs,
    )


def banned(request):
    ids, bias = request.bias()
    return set(ids[np.isneginf(bias)].tolist())


def test_greedy_requests_need_the_cheapest_program():
    # Filters cannot change an arg-max, so they must not cost a greedy batch anything.
    rows = [request(SamplingParams(temperature=0, top_k=5, top_p=0.5, min_p=0.1))] * 3
    batch = build_sampling_batch(rows, 4, V)
    assert batch.features == SamplerFeatures()
    assert (
        SamplingPacker(V).pack([batch], 4, batch.features).size == SamplingArrays.packed_size(4, batch.features) == 40
    )


@pytest.mark.parametrize(("temperature", "greedy"), [(1e-6, True), (MIN_TEMPERATURE, False)])
def test_greedy_is_what_the_parameters_say(temperature, greedy):
    row = request(SamplingParams(temperature=temperature, top_k=5))
    batch = build_sampling_batch([row], 1, V)
    assert (batch.features.greedy_only, batch.arrays.temperature[0] == 0, row.takes_argmax) == (greedy, greedy, greedy)
    assert row.params.greedy == greedy


def test_parameters_reach_their_rows_and_padding_is_neutral():
    rows = [
        request(SamplingParams(temperature=0.5, top_k=7, top_p=0.9, min_p=0.1), seed=2**40 + 3, output=[4, 5]),
        request(SamplingParams(top_k=-1, frequency_penalty=0.1, presence_penalty=0.2, repetition_penalty=1.5)),
    ]
    batch = build_sampling_batch(rows, 4, V)
    arrays = batch.arrays
    assert batch.features.has_filters
    assert not batch.features.greedy_only
    np.testing.assert_array_equal(arrays.temperature, np.float32([0.5, 1, 0, 0]))
    np.testing.assert_array_equal(arrays.top_k, [7, V, V, V])
    np.testing.assert_array_equal(arrays.top_p, np.float32([0.9, 1, 1, 1]))
    np.testing.assert_array_equal(arrays.min_p, np.float32([0.1, 0, 0, 0]))
    np.testing.assert_array_equal(arrays.seed, [[3, 2**8], [1, 0], [0, 0], [0, 0]])
    np.testing.assert_array_equal(arrays.step, [2, 0, 0, 0])
    np.testing.assert_array_equal(arrays.frequency_penalty, np.float32([0, 0.1, 0, 0]))
    np.testing.assert_array_equal(arrays.presence_penalty, np.float32([0, 0.2, 0, 0]))
    np.testing.assert_array_equal(arrays.repetition_penalty, np.float32([1, 1.5, 1, 1]))


@pytest.mark.parametrize(("count", "width"), [(0, 0), (1, 64), (64, 64), (65, 256), (100, 256)])
def test_widths_grow_by_large_steps_so_that_programs_are_few(count, width):
    rows = [
        request(SamplingParams(logit_bias=dict.fromkeys(range(count), 1.0))),
        request(SamplingParams(allowed_token_ids=list(range(count)) or None)),
        request(SamplingParams(repetition_penalty=1.1), prompt=list(range(count))),
    ]
    features = build_sampling_batch(rows, 3, V).features
    assert (features.bias_width, features.allowed_width, features.history_width) == (width, width, width)


@pytest.mark.parametrize(("wanted", "returned"), [([None], None), ([None, 0], 20), ([0, 1], 20), ([20], 20)])
def test_counts_of_logprobs_share_a_program(wanted, returned):
    rows = [request(SamplingParams(logprobs=n)) for n in wanted]
    assert build_sampling_batch(rows, 4, V).features.num_logprobs == returned


def test_unpack_restores_every_field_bit_for_bit():
    rows = [
        request(SamplingParams(temperature=0.1, top_p=0.3, seed=5), seed=2**64 - 1),
        request(SamplingParams(logit_bias={3: -0.0}, min_tokens=1), eos_token_ids=[2]),
        request(SamplingParams(allowed_token_ids=[999, 0], repetition_penalty=1.1), prompt=list(range(40))),
    ]
    batch = build_sampling_batch(rows, 8, V)
    features = batch.features
    packed = SamplingPacker(V).pack([batch], 8, features)
    arrays = SamplingArrays.views(packed, 8, features)
    for name, field, given in zip(arrays._fields, arrays, batch.arrays, strict=True):
        if not name.startswith("history"):
            assert field.tobytes() == given.tobytes(), name
    assert packed.dtype == np.int32
    assert packed.size == SamplingArrays.packed_size(8, features)
    unpacked = jax.jit(SamplingArrays.unpack, static_argnums=(1, 2))(packed, 8, features)
    for name, before, after in zip(SamplingArrays._fields, arrays, unpacked, strict=True):
        assert before.dtype == after.dtype, name
        np.testing.assert_array_equal(before, after, err_msg=name)
        assert before.tobytes() == np.asarray(after).tobytes(), name


def counts(row):
    history = row.history()
    return dict(zip(history.ids[: len(history)].tolist(), history.counts[: len(history)].tolist(), strict=True))


def test_history_follows_the_live_output_and_grows():
    output = []
    row = request(SamplingParams(repetition_penalty=1.2), prompt=[7, 7, 8], output=output)
    rng = np.random.default_rng(0)
    for _ in range(50):
        output.extend(rng.integers(0, 60, size=3).tolist())
        assert counts(row) == {i: output.count(i) for i in {7, 8, *output}}


def test_history_leaves_the_prompt_out_where_only_the_output_counts():
    assert counts(request(SamplingParams(presence_penalty=1.0), prompt=[1, 2, 3], output=[2])) == {2: 1}


def test_min_tokens_holds_back_end_and_stop_tokens_until_reached():
    output = []
    row = request(SamplingParams(min_tokens=2, stop_token_ids=[9]), output=output, eos_token_ids=[2, 3])
    for expected in ({2, 3, 9}, {2, 3, 9}, set(), set()):
        assert banned(row) == expected
        output.append(1)


def test_a_bad_words_last_token_is_banned_after_its_head():
    output = []
    row = request(output=output, bad_words_token_ids=[[5], [6, 7], [6, 6, 8]])
    for token_id, expected in [(6, {5, 7}), (6, {5, 7, 8}), (1, {5}), (6, {5, 7})]:
        output.append(token_id)
        assert banned(row) == expected


def test_a_ban_outweighs_a_bias():
    row = request(SamplingParams(logit_bias={5: 100.0, 6: 1.0}), bad_words_token_ids=[[5]])
    ids, bias = row.bias()
    assert dict(zip(ids.tolist(), bias.tolist(), strict=True)) == {5: -np.inf, 6: 1.0}


def test_bad_words_of_several_tokens_give_way_where_nothing_else_is_allowed():
    row = request(SamplingParams(allowed_token_ids=[4]), output=[4], bad_words_token_ids=[[4, 4]])
    assert banned(row) == set()


def test_parameters_that_leave_no_token_are_refused():
    with pytest.raises(RequestError, match="bad_words"):
        request(SamplingParams(allowed_token_ids=[4, 5]), bad_words_token_ids=[[4], [5]])
    with pytest.raises(RequestError, match="min_tokens=3"):
        request(SamplingParams(allowed_token_ids=[2], min_tokens=3), eos_token_ids=[2])
    with pytest.raises(RequestError, match="every token of the vocabulary"):
        request(bad_words_token_ids=[[0], [1]], vocab_size=2)


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(logit_bias={V: 1.0}),
        SamplingParams(allowed_token_ids=[0, V]),
        SamplingParams(stop_token_ids=[V]),
    ],
)
def test_token_ids_beyond_the_vocabulary_are_refused(params):
    with pytest.raises(RequestError, match=r"holds 1000; the model's token ids are 0 to 999"):
        validate_for_vocab(params, V)
    validate_for_vocab(params, V + 1)


def test_bad_words_are_tokenized_with_and_without_a_leading_space():
    vocab = {"ab": (1,), " ab": (2, 3), "c": (4,), " c": (4,), "\n": (6,)}
    assert tokenize_bad_words([" ab", "c", "\n"], vocab.__getitem__, 10) == [(1,), (2, 3), (4,), (6,)]


@pytest.mark.parametrize("token_ids", [(), (3, 10)])
def test_a_bad_word_the_vocabulary_cannot_spell_is_refused(token_ids):
    with pytest.raises(RequestError, match="'x'"):
        tokenize_bad_words(["x"], lambda text: token_ids, 10)


def test_seeds_are_the_requests_own_or_distinct_and_reproducible():
    def seeds(params, engine_seed=0):
        own = params.seed
        drawn = [draw_seed(engine_seed, number) if own is None else own for number in range(20)]
        return [sequence_seed(seed, index) for seed in drawn for index in range(5)]

    seeded = seeds(SamplingParams(seed=-1))
    assert seeded[0] == 2**64 - 1
    assert seeded[:5] == seeded[5:10]
    assert len(set(seeded)) == 5
    unseeded = seeds(SamplingParams())
    assert len(set(unseeded)) == 100
    assert all(0 <= seed < 2**53 for seed in unseeded[::5])  # as JSON's numbers are read everywhere
    assert unseeded == seeds(SamplingParams())
    assert not set(unseeded) & set(seeds(SamplingParams(), engine_seed=1))


def test_tokens_in_flight_count_for_the_step_and_for_min_tokens():
    rows = [request(SamplingParams(min_tokens=2), output=[5], eos_token_ids=[9]) for _ in range(2)]
    arrays = build_sampling_batch(rows, 2, V, num_inflight=[0, 1]).arrays
    np.testing.assert_array_equal(arrays.step, [1, 2])
    assert (arrays.bias_ids == 9).any(axis=1).tolist() == [True, False]
