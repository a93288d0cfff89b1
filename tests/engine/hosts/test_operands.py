"""Operands between hosts: what has changed rebuilds vectors, and a decode sends little."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxis.config.attention_span import FULL_CONTEXT
from jaxis.engine.execution.step_inputs import pack_step
from jaxis.engine.execution.step_shapes import StepShape
from jaxis.engine.hosts import messages
from jaxis.engine.hosts.operands import ReceivedOperands, SentOperands
from jaxis.host.channel import encode, to_frame
from tests.support.simulated_engine import SimulatedEngine

INT32 = st.integers(-(2**31), 2**31 - 1)


@st.composite
def calls(draw):
    """Vectors of a few programs, each a change of any size to the last of its program, or one of another length."""
    vectors, last = [], {}
    for number in draw(st.lists(st.integers(1, 3), max_size=12)):
        if number in last and draw(st.integers(0, 9)):
            vector = last[number].copy()
            indices = draw(st.lists(st.integers(0, len(vector) - 1), max_size=len(vector))) if len(vector) else []
            for index in indices:
                vector[index] = draw(INT32)
        else:
            vector = np.asarray(draw(st.lists(INT32, max_size=20)), np.int32)
        last[number] = vector
        vectors.append((number, vector))
    return vectors


@given(calls())
def test_what_has_changed_rebuilds_the_vector(vectors):
    sent, received, before = SentOperands(), ReceivedOperands(), []
    for number, vector in vectors:
        call = messages.Run(number, sent.encode(number, [vector, None, 7]))
        arrived = messages.ORDERS.decode(encode(call))
        rebuilt, *others = received.decode(number, arrived.operands)
        assert others == [None, 7]
        assert rebuilt.dtype == np.int32
        before.append((rebuilt, vector))
        for found, expected in before:  # earlier ones, which devices may still read, stay
            np.testing.assert_array_equal(found, expected)
        [sent_vector, *_] = arrived.operands
        assert len(sent_vector.values) + len(sent_vector.changed or b"") <= vector.nbytes


@pytest.mark.parametrize(
    "message",
    [
        messages.Vector(b"\0" * 4, b"\3\0\0\0"),
        messages.Vector(b"\0" * 4, b"\xff\xff\xff\xff"),
        messages.Vector(b"\0" * 8, b"\0" * 4),
        messages.Vector(b"\0" * 3),
        messages.Vector(b"\0" * 4, b"\0"),
    ],
)
def test_changes_that_do_not_go_with_the_last_vector_are_refused(message):
    received = ReceivedOperands()
    received.decode(1, SentOperands().encode(1, [np.arange(3, dtype=np.int32)]))
    with pytest.raises(ValueError, match=r"do not go with|buffer size"):
        received.decode(1, [message])
    with pytest.raises(ValueError, match=r"do not go with|buffer size"):
        received.decode(2, [messages.Vector(b"\0" * 4, b"\0" * 4)])


def test_a_decode_of_64_requests_with_2048_blocks_each_sends_kilobytes():
    """The vector has 512 KiB; with the tokens in flight of the step before, and blocks of 16 tokens."""
    engine = SimulatedEngine(
        num_blocks=1024, block_size=16, max_num_seqs=64, max_num_batched_tokens=1024, max_model_len=2048 * 16
    )
    shape = StepShape(64, 64, 2048, 16, (FULL_CONTEXT,))
    for i in range(64):
        engine.add([1 + i % 20] * (5 + i), max_tokens=100)
    sent, sizes, last = SentOperands(), [], {}
    while len(sizes) < 33:
        output = engine.schedule()
        if output.num_decodes == len(output.scheduled) == 64:
            packed = pack_step(output, shape, last)
            sizes.append(len(to_frame(messages.Run(1, sent.encode(1, [packed])))))
        engine.update()
    assert packed.nbytes > 512 * 1024
    assert sizes[0] > packed.nbytes
    assert max(sizes[1:]) < 3000
