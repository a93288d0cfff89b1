"""The devices that take no time are driven by a real engine, which must find in them all that it asks devices for."""

import pytest

from host_cost import KINDS, make_engine


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_every_kind_of_sequence_is_stepped_with_idle_devices(num_ranks):
    engine = make_engine(num_ranks, len(KINDS), 20, 10)
    for i, params in enumerate(KINDS.values()):
        engine.add_request(str(i), list(range(20)), params)
    for _ in range(4):
        requests = engine.step()
    # The devices sample token 1.
    assert {request.request_id: request.completions[0].sequence.output_token_ids for request in requests} == {
        "0": [1] * 4,
        "1": [1] * 4,
        "2": [1] * 4,
    }
