"""An engine that makes vectors, in its own process and thread: the same vectors, and what cancelling and kills do."""

import asyncio
import contextlib
import json
import os
import signal
import threading

import msgspec
import numpy as np
import pytest

from jaxis import LLM
from jaxis.engine.client import wire
from jaxis.engine.client.engine_process import EngineProcess
from jaxis.engine.client.engine_thread import EngineThread
from jaxis.engine.client.wire import Call, CancelCall
from jaxis.errors import ConfigError, EngineError, UnavailableError
from jaxis.host.channel import MessageReader, to_frame
from jaxis.pooling.async_pooling import AsyncPoolingEngine
from jaxis.pooling.pooling_core import PoolingCore
from jaxis.pooling.pooling_info import POOLING
from tests.support.encoder_checkpoints import save_classifier, save_model, save_pooling
from tests.support.waiting import eventually, wait_until

STEP = {"max_num_batched_tokens": 128, "max_num_seqs": 8}
TEXTS = [[2, *range(5, 5 + length), 3] for length in (1, 40, 7, 60, 3, 25, 9, 9, 30, 2, 2, 50)]


@contextlib.asynccontextmanager
async def running(folder):
    process = EngineProcess({"model": folder, **STEP}, POOLING, stall_seconds=60.0)
    engine = AsyncPoolingEngine(process, max_queued=8, stall_seconds=60.0)
    engine.start()
    try:
        async with asyncio.timeout(180):
            yield engine, process
    finally:
        await engine.shutdown()


def test_its_facts_and_vectors_are_those_of_this_process_and_a_kill_fails_only_what_waits(tmp_path):
    save_model(tmp_path)
    save_pooling(tmp_path, max_seq_length=64)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"matryoshka_dimensions": [16, 32]}))
    with LLM(tmp_path, show_progress=False, **STEP) as llm:
        expected = np.array([each.outputs.embedding for each in llm.embed(TEXTS)], np.float32)
        info = llm._embedder.info

    async def scenario():
        async with running(tmp_path) as (engine, process):
            assert engine.pooling_info == info
            assert np.array_equal(await engine.pool(TEXTS), expected)
            found = await asyncio.gather(*(engine.pool([text], client=str(i)) for i, text in enumerate(TEXTS)))
            assert np.array_equal(np.concatenate(found), expected)
            os.kill(process.pid, signal.SIGSTOP)
            waiting = asyncio.create_task(engine.pool(TEXTS))
            left = asyncio.create_task(engine.pool(TEXTS))
            await asyncio.sleep(0)
            left.cancel()
            os.kill(process.pid, signal.SIGKILL)
            with pytest.raises(UnavailableError, match="signal 9"):
                await waiting
            await eventually(lambda: engine.is_accepting)
            assert np.array_equal(await engine.pool(TEXTS), expected)

    asyncio.run(scenario())


def test_a_classifiers_facts_cross(tmp_path):
    save_classifier(tmp_path, num_labels=3)
    with LLM(tmp_path, show_progress=False, **STEP) as llm:
        info = llm._embedder.info
    assert len(info.classifier.labels) == 3
    [ready] = MessageReader(wire.REPORTS).feed(to_frame(wire.EngineReady(info)))
    assert msgspec.convert(ready.info, POOLING.info) == info


@pytest.mark.slow
def test_an_error_of_building_is_raised_here(tmp_path):
    save_model(tmp_path)
    with pytest.raises(ConfigError, match="data_parallel_size=2"):
        EngineProcess({"model": tmp_path, "data_parallel_size": 2}, POOLING, stall_seconds=60.0)


class Model:
    """Vectors that count the steps; a test holds them up.

    Attributes:
      steps: The texts of each step.
      value: What all vectors are.
    """

    max_step_tokens, max_step_texts, compile_wait = 4, 2, None

    def __init__(self):
        self.steps, self.go_on, self.value = [], threading.Event(), 1.0

    def begin(self, texts, second_starts):
        self.steps.append(texts)
        self.go_on.wait(60)
        return np.full((self.max_step_texts, 2), self.value, np.float32)


@contextlib.contextmanager
def thread_of(model):
    done, failures = {}, []

    def deliver(new):
        done.update({each.call_id: each for each in new.calls})

    thread = EngineThread(PoolingCore(model), deliver, failures.append)
    thread.start()
    try:
        yield thread, done, failures
    finally:
        model.go_on.set()
        assert thread.stop(10)


def pool(call_id, *texts):
    return Call(call_id, "pool", [list(texts), [], None, 0])


def test_a_request_that_is_cancelled_leaves_the_steps_to_the_others():
    model = Model()
    with thread_of(model) as (thread, done, _):
        thread.take(pool(1, *[[1]] * 9))
        wait_until(lambda: model.steps)
        thread.take(pool(2, [2]))
        thread.take(CancelCall(1))
        thread.take(CancelCall(7))
        model.go_on.set()
        wait_until(lambda: 2 in done)
        assert model.steps == [[[1], [1]], [[2]]]
        assert np.frombuffer(done[2].value, "<f4").tolist() == [1, 1]
        wait_until(lambda: thread.stats.num_requests_waiting == thread.stats.num_requests_running == 0)
        assert thread.is_making_progress(60)
        assert set(done) == {2}


def test_a_vector_that_is_not_finite_fails_its_request_and_a_broken_step_the_engine():
    model = Model()
    with thread_of(model) as (thread, done, failures):
        model.go_on.set()
        model.value = float("nan")
        thread.take(pool(1, [1], [1]))
        wait_until(lambda: done)
        with pytest.raises(EngineError, match="text 0 is not finite"):
            raise done[1].failure.error()
        model.value = 1.0
        thread.take(pool(2, [1]))
        wait_until(lambda: 2 in done)
        assert done[2].failure is None
        model.begin = lambda *_: 1 / 0
        thread.take(pool(3, [1]))
        wait_until(lambda: failures)
        assert isinstance(failures[0], ZeroDivisionError)
        assert not thread.is_making_progress(60)
