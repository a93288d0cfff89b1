from array import array

import jax
import numpy as np
import pytest

from jaxis import SamplingParams
from jaxis.config.attention_span import FULL_CONTEXT, AttentionSpan
from jaxis.engine.execution.step_inputs import pack_step, unpack_step
from jaxis.engine.execution.step_shapes import StepShape
from jaxis.engine.scheduling.scheduler_output import ScheduledSequence, SchedulerOutput
from jaxis.engine.scheduling.sequence import BlockTable, Sequence, SequenceId

SHAPE = StepShape(num_tokens=16, num_seqs=4, max_blocks=3, block_size=4, spans=(FULL_CONTEXT,))


def make_sequence(name, num_prompt_tokens, output, block_ids):
    prompt = [100 + i for i in range(num_prompt_tokens)]
    return Sequence(
        SequenceId(name),
        prompt,
        SamplingParams(),
        frozenset(),
        1000,
        arrival=0,
        output_token_ids=output,
        block_tables=[BlockTable(array("i", block_ids))],
    )


def unpacked(output, shape, inflight_rows, last_tokens):
    packed = pack_step(output, shape, inflight_rows)
    assert packed.shape == (shape.packed_size,)
    assert packed.dtype == np.int32
    unpack = jax.jit(lambda packed, last_tokens: vars(unpack_step(packed, shape, last_tokens)))
    return jax.tree.map(np.asarray, unpack(packed, np.asarray(last_tokens, np.int32)))


def test_decodes_and_prefill_chunks_in_one_flat_batch():
    """Two decodes, the second with its token in flight at row 3 of the step before; then 5 tokens of a prefill."""
    known = make_sequence("known", 4, [7, 8], [2, 5])
    in_flight = make_sequence("in flight", 3, [], [9])
    prefill = make_sequence("prefill", 12, [], [1, 0, 4])
    scheduled = (
        ScheduledSequence(known, 5, 1, samples=True),
        ScheduledSequence(in_flight, 3, 1, samples=True),
        ScheduledSequence(prefill, 6, 5, samples=False),
    )
    step = unpacked(
        SchedulerOutput(scheduled, 2, ()), SHAPE, {SequenceId("in flight"): 3, SequenceId("known"): 1}, [40, 41, 42, 43]
    )
    metadata = step["attention_metadata"]
    assert step["input_ids"][:7].tolist() == [8, 43, 106, 107, 108, 109, 110]
    assert metadata.input_positions[:7].tolist() == [5, 3, 6, 7, 8, 9, 10]
    assert metadata.block_tables[:3].tolist() == [[2, 5, 0], [9, 0, 0], [1, 0, 4]]
    assert metadata.seq_lens.tolist() == [6, 4, 11, 0]
    assert metadata.query_start_loc.tolist() == [0, 1, 2, 7, 7]
    assert metadata.request_distribution.tolist() == [2, 3, 3]
    assert step["logits_rows"][:3].tolist() == [0, 1, 6]


def test_tables_of_windows_have_only_what_the_step_sees():
    """Blocks of 4, a window of 5 and chunks of 8: a decode at position 21, and positions 10 to 12 of a prefill."""
    spans = (FULL_CONTEXT, AttentionSpan(5), AttentionSpan(None, 8))
    shape = StepShape(num_tokens=4, num_seqs=3, max_blocks=100, block_size=4, spans=spans)
    decode = make_sequence("decode", 22, [], [10, 11, 12, 13, 14, 15])
    decode.block_tables += [BlockTable(array("i", [23, 24, 25]), 3), BlockTable(array("i", [34, 35]), 4)]
    prefill = make_sequence("prefill", 20, [], [1, 2, 3, 4, 5])
    prefill.block_tables += [BlockTable(array("i", [41, 42, 43]), 1), BlockTable(array("i", [51, 52, 53]), 1)]
    scheduled = (ScheduledSequence(decode, 21, 1, samples=True), ScheduledSequence(prefill, 10, 3, samples=False))
    metadata = unpacked(SchedulerOutput(scheduled, 1, ()), shape, {}, [0, 0, 0])["attention_metadata"]
    full, window, chunk = (metadata.block_tables_for(span) for span in spans)
    assert full is metadata.block_tables
    assert full.shape == window.shape == chunk.shape == (3, 100)
    assert full[0, :6].tolist() == [10, 11, 12, 13, 14, 15]
    assert full[1, :4].tolist() == [1, 2, 3, 4]
    assert window[0, 4:6].tolist() == [24, 25]
    assert window[1, 1:4].tolist() == [41, 42, 43]
    assert chunk[0, 4:6].tolist() == [34, 35]
    assert chunk[1, 2:4].tolist() == [52, 53]
    # Where nothing is to be read stand blocks of the sequence itself, or the 0 of what was not packed.
    assert set(window[0].tolist()) <= {24, 25, 0}
    # The vector has room for what a step may see, not for 100 blocks a window.
    assert shape.packed_size < 3 * 100 + 3 * 2 * 6 + 50
    with pytest.raises(ValueError, match="not in tuple"):
        metadata.block_tables_for(AttentionSpan(6))


def test_recomputed_output_tokens_follow_the_prompt():
    sequence = make_sequence("preempted", 3, [7, 8, 9], [0])
    output = SchedulerOutput((ScheduledSequence(sequence, 2, 4, samples=True),), 0, ())
    step = unpacked(output, SHAPE, {}, [0])
    assert step["input_ids"][:4].tolist() == [102, 7, 8, 9]
    assert step["attention_metadata"].request_distribution.tolist() == [0, 1, 1]


def test_step_of_one_token():
    shape = StepShape(num_tokens=1, num_seqs=1, max_blocks=1, block_size=4, spans=(FULL_CONTEXT,))
    sequence = make_sequence("one", 1, [], [6])
    step = unpacked(SchedulerOutput((ScheduledSequence(sequence, 0, 1, samples=True),), 0, ()), shape, {}, [99])
    assert step["input_ids"].tolist() == [100]
    assert step["attention_metadata"].seq_lens.tolist() == [1]
