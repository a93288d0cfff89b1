"""Texts of several clients share steps."""

from __future__ import annotations

from jaxis.pooling.client.pooling_queue import PoolingQueue
from jaxis.pooling.client.wire import PoolTexts


def request(name, lengths, client=None, priority=0):
    return PoolTexts(name, [[0] * length for length in lengths], client, priority)


def taken(queue, max_tokens=100, max_texts=10):
    return [(text.request_id, text.index) for text in queue.take(max_tokens, max_texts)]


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


def test_a_better_priority_is_first_and_what_is_removed_is_gone():
    queue = PoolingQueue()
    queue.add(request("late", [1, 1]))
    queue.add(request("gone", [1, 1], priority=-2))
    queue.add(request("soon", [1], priority=-1))
    queue.remove("gone")
    queue.remove("unknown")
    assert queue.num_texts == 3
    assert taken(queue) == [("soon", 0), ("late", 0), ("late", 1)]
