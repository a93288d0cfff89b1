"""AsyncLLMEngine: every waiting coroutine gets its tokens or an error, whatever the engine does. No coroutine hangs."""

import asyncio
import contextlib
import threading
import time

import pytest

from jaxis.engine.client.async_llm_engine import AsyncLLMEngine
from jaxis.engine.execution.calls import EngineCall
from jaxis.engine.execution.programs import CompileWait
from jaxis.errors import (
    CheckpointError,
    DeadlineExceededError,
    EngineError,
    OverloadedError,
    RequestError,
    UnavailableError,
)
from jaxis.prompts import TokenizedPrompt
from jaxis.sampling_params import SamplingParams
from tests.support.fake_engine import MAX_NUM_SEQS, fake_built_engine
from tests.support.local_engine import LocalEngine
from tests.support.waiting import a_minute_later, eventually

PROMPT = TokenizedPrompt(None, [1, 2, 3])
FOREVER = SamplingParams(max_tokens=10**6)


@contextlib.asynccontextmanager
async def running(calls=None, **settings):
    """(AsyncLLMEngine, the fake engine behind it); nothing in a test may take longer than 60 s."""
    built = fake_built_engine()
    built.calls = calls or {}
    engine = AsyncLLMEngine(LocalEngine(built), **({"max_queued": 512, "stall_seconds": 120.0} | settings))
    engine.start()
    try:
        async with asyncio.timeout(60):
            yield engine, built.engine
    finally:
        built.engine.before_step = lambda: None
        await engine.shutdown()


async def collect(engine, request_id, max_tokens=20, n=1, prompt=PROMPT, **more):
    """The token ids of each completion, and the finish reasons."""
    tokens, reasons = [[] for _ in range(n)], [None] * n
    params = SamplingParams(max_tokens=max_tokens, n=n)
    async for output in engine.generate(prompt, params, request_id, **more):
        for completion in output.outputs:
            tokens[completion.index] += completion.token_ids
            reasons[completion.index] = completion.finish_reason
    return tokens, reasons


def test_every_request_gets_all_its_tokens_once():
    async def scenario():
        async with running() as (engine, _):
            results = await asyncio.gather(*(collect(engine, f"r{i}", 1 + i % 7, n=1 + i % 3) for i in range(50)))
        for i, (tokens, reasons) in enumerate(results):
            assert tokens == [list(range(1 + i % 7))] * (1 + i % 3)
            assert reasons == ["length"] * (1 + i % 3)

    asyncio.run(scenario())


def test_a_slow_reader_gets_everything_in_few_pieces():
    async def scenario():
        async with running() as (engine, _):
            stream = engine.generate(PROMPT, SamplingParams(max_tokens=500), "slow")
            first = await anext(stream)
            [unread] = engine._streams.values()
            await eventually(lambda: unread.ended)
            rest = [output async for output in stream]
        tokens = [t for output in [first, *rest] for c in output.outputs for t in c.token_ids]
        assert tokens == list(range(500))
        assert len(rest) <= 2

    asyncio.run(scenario())


def test_final_only_yields_once():
    async def scenario():
        async with running() as (engine, _):
            stream = engine.generate(PROMPT, SamplingParams(max_tokens=30, n=2), "r", final_only=True)
            [output] = [output async for output in stream]
            assert [completion.token_ids for completion in output.outputs] == [list(range(30))] * 2
            assert output.first_token_time is not None

    asyncio.run(scenario())


def test_a_bad_request_fails_alone():
    async def scenario():
        async with running() as (engine, _):
            good = asyncio.create_task(collect(engine, "good", 50))
            with pytest.raises(RequestError, match="empty"):
                await collect(engine, "empty", prompt=TokenizedPrompt(None, []))
            with pytest.raises(EngineError, match="a fault in the engine"):
                await collect(engine, "fault", prompt=TokenizedPrompt(None, [13]))
            assert (await good)[0] == [list(range(50))]
            assert engine.is_making_progress

    asyncio.run(scenario())


def test_a_failed_step_fails_its_requests_and_the_engine_goes_on():
    async def scenario():
        async with running() as (engine, fake):

            def fail():
                if len(fake.requests) == 5:
                    raise RuntimeError("out of memory")

            fake.before_step = fail
            params = SamplingParams(max_tokens=10**6)
            tasks = [asyncio.create_task(anext_until_error(engine, params, f"r{i}")) for i in range(5)]
            for error in await asyncio.gather(*tasks):
                assert type(error) is EngineError
                assert "out of memory" in str(error)
            assert (await collect(engine, "next"))[0] == [list(range(20))]

    asyncio.run(scenario())


async def anext_until_error(engine, params, request_id):
    try:
        async for _ in engine.generate(PROMPT, params, request_id):
            pass
    except Exception as error:
        return error


def test_a_permanent_fault_fails_waiting_and_later_requests():
    async def scenario():
        async with running() as (engine, fake):

            def fail():
                raise MemoryError("the device is lost")

            waiting = asyncio.create_task(anext_until_error(engine, FOREVER, "waiting"))
            await eventually(lambda: fake.steps > 0)
            fake.before_step = fail
            assert "the device is lost" in str(await waiting)
            with pytest.raises(UnavailableError, match="restarted"):
                await collect(engine, "late")
            with pytest.raises(UnavailableError), engine.reserve():
                pass
            assert not engine.is_making_progress

    asyncio.run(scenario())


def test_leaving_a_stream_aborts_its_request():
    async def scenario():
        async with running() as (engine, fake):
            async with contextlib.aclosing(engine.generate(PROMPT, FOREVER, "left")) as stream:
                await anext(stream)
            await eventually(lambda: not fake.requests)
            task = asyncio.create_task(collect(engine, "cancelled", 10**6))
            await eventually(lambda: fake.requests)
            task.cancel()
            await eventually(lambda: not fake.requests)
            # The id is free again, and what was left of its first request does not reach the second.
            assert (await collect(engine, "left", 3))[0] == [[0, 1, 2]]

    asyncio.run(scenario())


def test_an_id_is_free_as_soon_as_its_request_was_left():
    """Before the engine has seen the abort, and even where it still has the request's last output to send."""

    async def scenario():
        async with running() as (engine, fake):
            release = threading.Event()
            for number in range(3):
                fake.before_step = release.wait
                async with contextlib.aclosing(engine.generate(PROMPT, FOREVER, "r")) as stream:
                    release.set()
                    await anext(stream)
                    release.clear()
                    await eventually(lambda steps=fake.steps: fake.steps > steps)
                again = asyncio.create_task(collect(engine, "r", 3 + number))
                await asyncio.sleep(0)
                release.set()
                assert await again == ([list(range(3 + number))], ["length"])
                release.clear()

    asyncio.run(scenario())


def test_abort_ends_the_stream_with_its_reason():
    async def scenario():
        async with running() as (engine, fake):
            task = asyncio.create_task(collect(engine, "r", 10**6))
            await eventually(lambda: fake.requests)
            engine.abort("r")
            engine.abort("unknown")
            tokens, reasons = await task
            assert reasons == ["abort"]
            assert tokens[0] == list(range(len(tokens[0])))

    asyncio.run(scenario())


def test_deadline_even_while_a_step_hangs():
    async def scenario():
        async with running(stall_seconds=0.05) as (engine, fake):
            release = threading.Event()
            fake.before_step = release.wait
            with pytest.raises(DeadlineExceededError, match=r"0\.2 s"):
                await collect(engine, "r", timeout_seconds=0.2)
            assert not engine.is_making_progress
            release.set()
            await eventually(lambda: not fake.requests)
            assert engine.is_making_progress

    asyncio.run(scenario())


def test_idle_is_progress(monkeypatch):
    async def scenario():
        async with running(stall_seconds=1) as (engine, _):
            with a_minute_later(monkeypatch):
                assert engine.is_making_progress
            await collect(engine, "r")
            with a_minute_later(monkeypatch):
                await eventually(lambda: engine.is_making_progress)

    asyncio.run(scenario())


def test_compiling_is_progress_and_the_step_after_it_has_its_own_time(monkeypatch):
    async def scenario():
        async with running(stall_seconds=0.5) as (engine, fake):
            compiled, release = threading.Event(), threading.Event()

            def compile_then_hang():
                start = time.monotonic()
                fake.runner.last_compile_wait = CompileWait(start)
                compiled.wait(60)
                fake.runner.last_compile_wait = CompileWait(start, time.monotonic())
                release.wait(8)

            fake.before_step = compile_then_hang
            task = asyncio.create_task(collect(engine, "r", max_tokens=1))
            await eventually(lambda: fake.runner.last_compile_wait)
            with a_minute_later(monkeypatch):
                assert engine.is_making_progress
                monkeypatch.setattr("jaxis.engine.client.engine_thread.COMPILE_STALL_SECONDS", 0.1)
                assert not engine.is_making_progress
            compiled.set()
            await eventually(lambda: fake.runner.last_compile_wait.ended)
            assert engine.is_making_progress
            await eventually(lambda: not engine.is_making_progress)
            release.set()
            await task

    asyncio.run(scenario())


def test_places_are_bounded_and_come_back():
    async def scenario():
        async with running(max_queued=2) as (engine, _):
            with contextlib.ExitStack() as places:
                places.enter_context(engine.reserve(MAX_NUM_SEQS + 1))
                with pytest.raises(OverloadedError), engine.reserve(2):
                    pass
                places.enter_context(engine.reserve(1))
            with engine.reserve(MAX_NUM_SEQS + 2):
                pass
            with pytest.raises(RequestError, match="at most 6"), engine.reserve(MAX_NUM_SEQS + 3):
                pass

    asyncio.run(scenario())


def test_drain_lets_the_running_end_and_takes_no_more():
    async def scenario():
        async with running() as (engine, fake):
            fake.before_step = lambda: time.sleep(0.01)

            async def reserved():
                with engine.reserve():
                    return await collect(engine, "r", 20)

            task = asyncio.create_task(reserved())
            await eventually(lambda: fake.requests)
            drain = asyncio.create_task(engine.drain(5))
            await asyncio.sleep(0)
            assert not engine.is_accepting
            with pytest.raises(UnavailableError), engine.reserve():
                pass
            assert (await task)[0] == [list(range(20))]
            await drain

    asyncio.run(scenario())


def test_drain_ends_what_is_too_slow():
    async def scenario():
        async with running() as (engine, _):

            async def reserved():
                with engine.reserve():
                    return await anext_until_error(engine, FOREVER, "r")

            task = asyncio.create_task(reserved())
            await asyncio.sleep(0)
            await engine.drain(0.05)
            assert isinstance(await task, UnavailableError)

    asyncio.run(scenario())


def test_an_id_in_use_is_refused_and_its_owner_undisturbed():
    async def scenario():
        async with running() as (engine, fake):
            fake.before_step = lambda: time.sleep(0.001)
            task = asyncio.create_task(collect(engine, "r", 300))
            await eventually(lambda: fake.requests)
            with pytest.raises(RequestError, match="already exists"):
                await collect(engine, "r")
            assert (await task)[0] == [list(range(300))]

    asyncio.run(scenario())


def refuse(reason):
    raise reason


def test_a_call_has_its_result_or_its_error():
    places = []
    calls = {
        "double": EngineCall(lambda value: [2 * value, threading.current_thread().name]),
        "read": EngineCall(places.append, read=lambda value: [(value, threading.current_thread().name)]),
        "refuse": EngineCall(lambda: refuse(RequestError("must be 1", param="level"))),
        "fail": EngineCall(lambda: None, read=lambda: refuse(CheckpointError("no file"))),
        "break": EngineCall(lambda: refuse(ZeroDivisionError("x"))),
    }

    async def scenario():
        async with running(calls) as (engine, _):
            assert await engine.call("double", 4, returns=tuple[int, str]) == (8, "jaxis-engine")
            assert await engine.call("read", "a", returns=type(None)) is None
            assert places == [("a", "jaxis-read")]
            with pytest.raises(RequestError, match="level must be 1") as refused:
                await engine.call("refuse", returns=type(None))
            assert refused.value.param == "level"
            with pytest.raises(CheckpointError, match="no file"):
                await engine.call("fail", returns=type(None))
            with pytest.raises(EngineError, match="ZeroDivisionError: x"):
                await engine.call("break", returns=type(None))
            with pytest.raises(RequestError, match="no function 'load_adapter'"):
                await engine.call("load_adapter", "folder", returns=bytes)
            assert (await collect(engine, "r", 3))[0] == [[0, 1, 2]]

    asyncio.run(scenario())


def test_a_call_takes_effect_between_the_requests_around_it():
    known = []
    calls = {"note": EngineCall(lambda: known.append(0))}

    async def scenario():
        async with running(calls) as (engine, fake):
            release = threading.Event()
            fake.before_step = release.wait
            first = asyncio.create_task(collect(engine, "first", 10**6))
            await eventually(lambda: fake.steps)
            call = asyncio.create_task(engine.call("note", returns=type(None)))
            await asyncio.sleep(0)
            fake.add_request = lambda *_, **__: refuse(RequestError(f"after {len(known)}"))
            release.set()
            with pytest.raises(RequestError, match="after 1"):
                await collect(engine, "second")
            await call
            engine.abort("first")
            await first

    asyncio.run(scenario())


def test_a_pause_waits_for_running_requests_and_holds_later_ones():
    async def scenario():
        async with running() as (engine, fake):
            release = threading.Event()
            fake.before_step = release.wait
            first = asyncio.create_task(collect(engine, "first", 3))
            await eventually(lambda: fake.steps)
            pause = asyncio.create_task(engine.pause("wait"))
            await asyncio.sleep(0.01)
            second = asyncio.create_task(collect(engine, "second", 3))
            await asyncio.sleep(0.01)
            assert not pause.done()
            release.set()
            await pause
            assert (await first)[0] == [[0, 1, 2]]
            assert (engine.is_paused, second.done(), fake.holds) == (True, False, {"paused"})
            [(described, state)] = await engine.describe()
            assert (described.request_id, state.status) == ("second", "waiting")
            await engine.resume()
            assert (await second)[0] == [[0, 1, 2]]
            third = asyncio.create_task(collect(engine, "third", 10**6))
            await eventually(lambda: fake.requests)
            early = asyncio.create_task(engine.pause("wait"))
            await asyncio.sleep(0.01)
            await engine.resume()
            with pytest.raises(EngineError, match="resumed before it was paused"):
                await early
            engine.abort("third")
            await third

    asyncio.run(scenario())


def test_a_call_that_waits_fails_with_the_engine():
    async def scenario():
        release = threading.Event()
        async with running({"hang": EngineCall(release.wait)}) as (engine, _):
            waiting = asyncio.create_task(engine.call("hang", returns=type(None)))
            await asyncio.sleep(0)
            await engine.drain(0)
            engine.fail_all(UnavailableError("shut down"))
            with pytest.raises(UnavailableError, match="shut down"):
                await waiting
            release.set()

    asyncio.run(scenario())
