"""Small tasks run beside large ones, and what waits can be taken back."""

import gc
import math
import threading
import weakref

import pytest

from jaxis.host.threads import SizedExecutor


@pytest.fixture
def executor():
    executor = SizedExecutor((10, 100, math.inf), "test")
    yield executor
    executor.shutdown()


def test_results_and_errors(executor):
    assert executor.submit(1, lambda: 5).result(20) == 5
    with pytest.raises(ZeroDivisionError):
        executor.submit(1000, lambda: 1 / 0).result(20)
    assert executor.submit(1000, threading.current_thread).result(20).daemon


def test_small_tasks_pass_any_number_of_large_ones(executor):
    go_on = threading.Event()
    large = [executor.submit(1000, go_on.wait) for _ in range(50)]
    middle = [executor.submit(50, go_on.wait) for _ in range(50)]
    assert [executor.submit(5, lambda: 1).result(20) for _ in range(3)] == [1, 1, 1]
    assert not any(future.done() for future in large + middle)
    go_on.set()
    assert all(future.result(20) for future in large + middle)


@pytest.mark.parametrize(("limit", "expected"), [(100, ["b", "c", "a"]), (math.inf, ["a", "b", "c"])])
def test_the_smallest_goes_first_and_the_oldest_is_not_forgotten(limit, expected):
    executor = SizedExecutor((limit,), "test")
    begun, go_on, order = threading.Event(), threading.Event(), []
    executor.submit(0, lambda: (begun.set(), go_on.wait(20)))
    assert begun.wait(20)
    names = {"a": 30, "b": 10, "c": 20}
    futures = [executor.submit(size, lambda name=name: order.append(name)) for name, size in names.items()]
    go_on.set()
    for future in futures:
        future.result(20)
    assert order == expected
    executor.shutdown()


def test_a_cancelled_task_is_forgotten(executor):
    class Large:
        pass

    begun, go_on = threading.Event(), threading.Event()
    executor.submit(1000, lambda: (begun.set(), go_on.wait(20)))
    assert begun.wait(20)
    held = Large()
    reference = weakref.ref(held)
    future = executor.submit(1000, lambda held=held: held)
    assert executor.num_waiting == 1
    assert future.cancel()
    assert executor.num_waiting == 0
    del future, held
    gc.collect()
    assert reference() is None
    go_on.set()


def test_shutdown_cancels_what_waits():
    executor = SizedExecutor((math.inf,), "test")
    begun, go_on = threading.Event(), threading.Event()
    running = executor.submit(0, lambda: (begun.set(), go_on.wait(20)))
    waiting = executor.submit(0, lambda: 1)
    assert begun.wait(20)
    executor.shutdown()
    assert waiting.cancelled()
    go_on.set()
    running.result(20)
    with pytest.raises(RuntimeError):
        executor.submit(0, lambda: 1)
