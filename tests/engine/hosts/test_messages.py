"""Messages between hosts: what is sent is what arrives, and nothing else is taken for one."""

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxis.config.attention_span import FULL_CONTEXT, AttentionSpan
from jaxis.engine.execution.sampling_batch import SamplerFeatures
from jaxis.engine.execution.step_inputs import StepShape
from jaxis.engine.execution.step_programs import ForwardKey, GreedyStepKey, LogitsKey, SampleKey, WholeKey
from jaxis.engine.hosts import messages
from jaxis.host.frames import FrameReader, FrameTooLargeError, frame

SHAPE = StepShape(32, 4, 8, 16, (FULL_CONTEXT, AttentionSpan(sliding_window=20)), True)
KEYS = [
    ForwardKey(SHAPE),
    GreedyStepKey(SHAPE),
    SampleKey(4, SamplerFeatures(greedy_only=False, mask_width=12, num_logprobs=20)),
    LogitsKey(32, targets=True),
    WholeKey(64),
]
VECTORS = st.lists(st.integers(-(2**31), 2**31 - 1), max_size=40).map(lambda values: np.asarray(values, np.int32))


@pytest.mark.parametrize("key", KEYS, ids=lambda key: type(key).__name__)
def test_keys_arrive_equal(key):
    assert key.shape.packed_size > 0 if hasattr(key, "shape") else True  # a cached property is no field
    order = messages.decode_order(messages.encode(messages.Prepare.of(3, key)))
    assert (order.number, order.program_key()) == (3, key)
    assert hash(order.program_key()) == hash(key)


@given(vector=VECTORS, other=st.none() | VECTORS)
def test_calls_arrive_equal(vector, other):
    data = None if other is None else other.tobytes()
    for call in (
        messages.Forward(7, messages.Vector(vector.tobytes())),
        messages.GreedyStep(7, messages.Vector(vector.tobytes(), b"")),
        messages.Sample(7, None if data is None else messages.Vector(data, data)),
        messages.Whole(7, vector.tobytes(), 5),
        messages.Logits(7, vector.tobytes(), data),
        messages.Recover(),
        messages.Close(),
    ):
        assert messages.decode_order(messages.encode(call)) == call
    np.testing.assert_array_equal(messages.vector(vector.tobytes()), vector)


@given(st.binary(max_size=60))
def test_other_bytes_are_no_message(data):
    for decode in (messages.decode_order, messages.decode_report):
        try:
            message = decode(data)
        except ValueError:
            continue
        assert isinstance(message, msgspec.Struct)


def test_a_key_of_no_program_is_refused():
    with pytest.raises(msgspec.ValidationError, match="no programs of kind 'Dict'"):
        messages.Prepare(1, "Dict", msgspec.Raw(b"\x80")).program_key()


@given(st.lists(st.binary(max_size=20)), st.integers(1, 9))
def test_frames_arrive_in_any_pieces(parts, size):
    stream, reader = b"".join(map(frame, parts)), FrameReader(20)
    pieces = (stream[i : i + size] for i in range(0, len(stream), size))
    assert [data for piece in pieces for data in reader.feed(piece)] == parts


def test_a_frame_that_is_too_long_is_refused_before_it_arrives():
    with pytest.raises(FrameTooLargeError, match="a message of 21 bytes; at most 20 are taken"):
        list(FrameReader(20).feed(frame(b"x" * 21)[:8]))
