"""Work on weights in several threads: in order, bounded, and no error is lost."""

import threading

import pytest

from jaxis.kernels.host_threads import BackgroundJobs, for_each_part


def test_parts_cover_the_range_in_order():
    assert for_each_part(lambda first, last: (first, last), 10, 4) == [(0, 4), (4, 8), (8, 10)]
    assert for_each_part(lambda first, last: (first, last), 0, 4) == []


def test_every_job_has_run_at_the_end():
    done = []
    with BackgroundJobs() as background:
        for i in range(200):
            background.submit(lambda i=i: done.append(i))
    assert sorted(done) == list(range(200))


def test_a_jobs_own_parts_wait_for_no_other_thread():
    """All threads have such a job, so that none is left for the parts."""
    results = []
    with BackgroundJobs() as background:
        for _ in range(100):
            background.submit(lambda: results.append(for_each_part(lambda first, _: first, 8, 1)))
    assert results == [list(range(8))] * 100


def test_jobs_that_wait_are_few():
    """What jobs hold is bounded: the caller waits before it makes more of them."""
    go, submitted = threading.Event(), []

    def submit():
        with BackgroundJobs() as background:
            for i in range(10_000):
                background.submit(go.wait)
                submitted.append(i)

    caller = threading.Thread(target=submit)
    caller.start()
    caller.join(0.2)
    assert caller.is_alive()
    assert 0 < len(submitted) < 10_000
    go.set()
    caller.join()
    assert len(submitted) == 10_000


def test_the_first_error_is_raised_once_all_jobs_are_over():
    done = []

    def job(i):
        done.append(i)
        if i in (3, 5):
            raise ValueError(f"job {i}")

    def run():
        with BackgroundJobs() as background:
            for i in range(6):
                background.submit(lambda i=i: job(i))

    with pytest.raises(ValueError, match="job 3"):
        run()
    assert sorted(done) == list(range(6))


def test_an_error_of_the_caller_is_kept():
    def run():
        with BackgroundJobs() as background:
            background.submit(lambda: 1 / 0)
            raise KeyError("caller")

    with pytest.raises(KeyError, match="caller"):
        run()
