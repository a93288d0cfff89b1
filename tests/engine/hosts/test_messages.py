"""Messages between hosts: what is sent is what arrives, and nothing else is taken for one."""

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxis.config.attention_span import FULL_CONTEXT, AttentionSpan
from jaxis.engine.execution.sampling_batch import SamplerFeatures
from jaxis.engine.execution.step_programs import ForwardKey, GreedyStepKey, LogitsKey, SampleKey, WholeKey
from jaxis.engine.execution.step_shapes import StepShape
from jaxis.engine.hosts import messages
from jaxis.host.channel import encode

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
    order = messages.ORDERS.decode(encode(messages.CompileProgram.of(3, key)))
    assert (order.number, order.program_key()) == (3, key)
    assert hash(order.program_key()) == hash(key)


@given(vector=VECTORS, other=st.none() | VECTORS)
def test_calls_arrive_equal(vector, other):
    data = None if other is None else other.tobytes()
    for call in (
        messages.Run(7, [messages.Vector(vector.tobytes())]),
        messages.Run(7, [messages.Vector(vector.tobytes(), b""), 5]),
        messages.Run(7, [None if data is None else messages.Vector(data, data), None]),
        messages.Recover(),
        messages.Close(),
    ):
        assert messages.ORDERS.decode(encode(call)) == call


@given(st.binary(max_size=60))
def test_other_bytes_are_no_message(data):
    for decoder in (messages.ORDERS, messages.REPORTS):
        try:
            message = decoder.decode(data)
        except ValueError:
            continue
        assert isinstance(message, msgspec.Struct)


def test_a_key_of_no_program_is_refused():
    with pytest.raises(msgspec.ValidationError, match="no programs of kind 'Dict'"):
        messages.CompileProgram(1, "Dict", msgspec.Raw(b"\x80")).program_key()
