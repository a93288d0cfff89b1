"""Texts of several clients share steps."""

from __future__ import annotations

import numpy as np
import pytest

from jaxis.errors import EngineError
from jaxis.pooling.pooling_queue import PoolingQueue, QueuedRequest


def request(name, lengths, client=None, priority=0):
    """The texts begin with the token of the request."""
    return QueuedRequest([[name] * length for length in lengths], (), client, priority)


def taken(queue, max_tokens=100, max_texts=10):
    return [(text.token_ids[0], text.index) for text in queue.take(max_tokens, max_texts)]


def test_a_clients_requests_are_served_in_their_order():
    queue = PoolingQueue()
    queue.add(request("first", [4, 4]))
    queue.add(request("second", [1]))
    assert queue.num_texts == 3
    assert taken(queue) == [("first", 0), ("first", 1), ("second", 0)]
    assert queue.num_texts == 0
    assert taken(queue) == []


def test_a_step_has_no_more_tokens_and_texts_than_it_has_room_for():
    queue = PoolingQueue()
    queue.add(request("a", [6, 6, 1, 1, 1]))
    assert taken(queue, max_tokens=10) == [("a", 0)]
    assert taken(queue, max_texts=2) == [("a", 1), ("a", 2)]


def test_a_single_query_does_not_wait_for_all_of_anothers_documents():
    queue = PoolingQueue()
    queue.add(request("documents", [10] * 50, client="a"))
    assert taken(queue, max_tokens=40) == [("documents", index) for index in range(4)]
    queue.add(request("query", [10], client="b"))
    assert ("query", 0) in taken(queue, max_tokens=20)


def test_a_better_priority_is_first_and_what_is_cancelled_is_gone():
    queue = PoolingQueue()
    queue.add(request("late", [1, 1]))
    gone = request("gone", [1, 1], priority=-2)
    queue.add(gone)
    queue.add(request("soon", [1], priority=-1))
    gone.vectors.cancel()
    assert queue.num_texts == 3
    assert taken(queue) == [("soon", 0), ("late", 0), ("late", 1)]


def test_a_request_ends_with_its_last_vector_or_its_first_that_is_not_finite():
    whole, broken = request("whole", [1, 1]), request("broken", [1, 1, 1])
    queue = PoolingQueue()
    queue.add(broken)
    for index in (1, 0):
        assert not whole.vectors.done()
        whole.put(index, np.array([index, 5], np.float32), is_finite=True)
    assert np.frombuffer(whole.vectors.result(), "<f4").tolist() == [0, 5, 1, 5]
    broken.put(1, np.array([np.nan], np.float32), is_finite=False)
    with pytest.raises(EngineError, match="the output for text 1 is not finite"):
        broken.vectors.result()
    broken.put(0, np.array([1], np.float32), is_finite=True)
    assert (queue.num_texts, taken(queue)) == (0, [])
