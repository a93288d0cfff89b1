"""Vectors that are kept from step to step hold, at every step, what a new one would."""

from __future__ import annotations

from collections import Counter, deque

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxis.engine.execution.sampling_batch import SamplerFeatures, SamplingArrays, build_sampling_batch
from jaxis.engine.execution.sampling_packer import SamplingPacker
from jaxis.engine.execution.sequence_sampling import SequenceSampling
from jaxis.engine.hosts.operands import ReceivedOperands, SentOperands
from jaxis.sampling_params import SamplingParams

V = 300
NUM_ROWS = 6
KINDS = [
    {"repetition_penalty": 1.3},
    {"frequency_penalty": 0.5, "logit_bias": {7: 1.0}},
    {"presence_penalty": 0.5, "temperature": 0.5, "top_p": 0.9, "seed": 3},
    {"allowed_token_ids": [1, 2, 3]},
    {"temperature": 0.0},
]
TOKENS = st.lists(st.integers(0, 12), max_size=5) | st.lists(st.integers(0, V - 1), max_size=5)
ENTRIES = st.lists(
    st.tuples(st.integers(0, 7), TOKENS.map(lambda tokens: tokens[:3])), max_size=3, unique_by=lambda entry: entry[0]
)
STEPS = st.lists(st.tuples(ENTRIES, ENTRIES, st.lists(TOKENS, min_size=8, max_size=8), st.booleans()), max_size=12)


def make_sequences() -> list[SequenceSampling]:
    prompts = np.random.default_rng(0).integers(0, V, (8, 100)).tolist()
    return [
        SequenceSampling(
            SamplingParams(**KINDS[i % len(KINDS)]),
            prompt_token_ids=prompts[i][: 30 * i],
            output_token_ids=[],
            vocab_size=V,
            seed=i,
        )
        for i in range(8)
    ]


def expected_history(sequence: SequenceSampling, prompt: set[int], drafts: list[int]) -> dict[int, int]:
    """By a plain count."""
    if not sequence.params.has_penalties:
        return {}
    seen = prompt if sequence.params.repetition_penalty != 1.0 else set()
    return dict.fromkeys(seen, 0) | Counter([*sequence.output_token_ids, *drafts])


@settings(max_examples=60, deadline=None)
@given(STEPS, st.integers(1, 3))
def test_a_kept_vector_holds_what_a_new_one_would(steps, num_unread):
    sequences, packer = make_sequences(), SamplingPacker(V, num_unread)
    prompts = [set(row[: 30 * i]) for i, row in enumerate(np.random.default_rng(0).integers(0, V, (8, 100)).tolist())]
    wide = SamplerFeatures(greedy_only=False, has_filters=True, history_width=256, bias_width=64, allowed_width=64)
    sent, received, numbers = SentOperands(), ReceivedOperands(), {}
    unread = deque(maxlen=num_unread)
    for first, second, new_tokens, is_wide in steps:
        for sequence, tokens in zip(sequences, new_tokens, strict=True):
            sequence.output_token_ids.extend(tokens)
        ranks = []
        for entries in (first, second):
            num_left = NUM_ROWS - len(entries)
            ranks.append([(i, drafts[: num_left // 2]) for i, drafts in entries])
        batches = [
            build_sampling_batch([sequences[i] for i, _ in rank], 9, V, drafts=[drafts for _, drafts in rank])
            for rank in ranks
        ]
        features = batches[0].features.join(batches[1].features)
        features = features.join(wide) if is_wide else features
        packed = packer.pack(batches, 9, features)
        np.testing.assert_array_equal(packed, SamplingPacker(V).pack(batches, 9, features))
        # Other hosts rebuild it from what differs from the last one of its program.
        number = numbers.setdefault(features, len(numbers))
        np.testing.assert_array_equal(received.decode(number, sent.encode(number, [packed]))[0], packed)
        for part, rank in zip(packed.reshape(2, -1), ranks, strict=True):
            arrays = SamplingArrays.views(part, 9, features)
            rows = [
                expected_history(sequences[i], prompts[i], drafts[:n])
                for i, drafts in rank
                for n in range(len(drafts) + 1)
            ]
            rows += [{}] * (9 - len(rows))
            for ids, counts, expected in zip(arrays.history_ids, arrays.history_counts, rows, strict=True):
                assert {i: n for i, n in zip(ids.tolist(), counts.tolist(), strict=True) if i < V} == expected
                assert not counts[ids == V].any()
        # The vectors of steps whose tokens were not read yet may still be read.
        for vector, written in unread:
            np.testing.assert_array_equal(vector, written)
            assert not np.shares_memory(vector, packed)
        unread.append((packed, packed.copy()))
