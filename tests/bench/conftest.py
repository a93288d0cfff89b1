"""A stub server of known delays, from the benchmarks."""

import asyncio
import contextlib
import threading

import pytest

from serving.stub_server import StubAnswer, StubServer


@contextlib.contextmanager
def stub_serving(answer):
    """Serves in a thread while the block runs; yields the URL and the server."""
    stub, loop, started, urls = StubServer(answer), asyncio.new_event_loop(), threading.Event(), []
    ended = asyncio.Event()

    async def serve():
        async with await stub.serve() as server:
            urls.append(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
            started.set()
            await ended.wait()

    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()), daemon=True)
    thread.start()
    assert started.wait(10)
    try:
        yield urls[0], stub
    finally:
        loop.call_soon_threadsafe(ended.set)
        thread.join(10)


@pytest.fixture
def serve_stub():
    """Starts a stub server with the answers of the test's own; it ends with the test."""
    with contextlib.ExitStack() as stack:
        yield lambda **answer: stack.enter_context(stub_serving(StubAnswer(**answer)))
