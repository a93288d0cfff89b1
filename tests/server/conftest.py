"""A real server on the embedded model, in a thread, and clients for it."""

from __future__ import annotations

import contextlib
import dataclasses
import threading

import httpx
import openai
import pytest

from jaxis.engine.arguments import EngineArgs
from jaxis.engine.client.async_llm_engine import AsyncLLMEngine
from jaxis.engine.setup import build_engine
from jaxis.host.progress import ProgressDisplay
from jaxis.server.config import ServerConfig
from jaxis.server.run import make_server
from tests.server.chromium import EXECUTABLE, Chromium
from tests.support.local_engine import LocalEngine
from tests.support.running_server import running
from tests.support.waiting import wait_until


@dataclasses.dataclass
class RunningServer:
    url: str
    engine: AsyncLLMEngine
    uvicorn: object
    thread: threading.Thread

    def wait_until_idle(self, seconds=20.0):
        """Waits until no sequence runs or waits and every cache block is free."""

        def is_idle():
            stats = self.engine.stats()
            return (stats.num_requests_running, stats.num_requests_waiting, stats.kv_cache_usage) == (0, 0, 0.0)

        wait_until(is_idle, seconds)

    def stop(self):
        self.uvicorn.should_exit = True
        self.thread.join(30)
        assert not self.thread.is_alive()


@pytest.fixture(scope="session")
def built_engine():
    arguments = EngineArgs(max_num_seqs=8, max_num_batched_tokens=64, kv_cache_memory="32MiB")
    built = build_engine(arguments, ProgressDisplay(False))
    yield built
    built.engine.close()


@contextlib.contextmanager
def serving(built, ssl_certfile=None, ssl_keyfile=None, **settings):
    """Serves an engine while the block runs."""
    config = ServerConfig(**{"drain_seconds": 1.0} | settings)
    engine = AsyncLLMEngine(LocalEngine(built), max_queued=config.max_queued, stall_seconds=config.stall_seconds)
    server = make_server(engine, config, ssl_certfile=ssl_certfile, ssl_keyfile=ssl_keyfile)
    with running(server) as (url, thread):
        yield RunningServer(url, engine, server, thread)


class SharedServer:
    """The server of the tests that need no settings: starting one for each of them would take longer than they do."""

    def __init__(self, built):
        self._built = built
        self._stack = contextlib.ExitStack()
        self._running = None

    def running(self):
        if self._running is None or not self._running.thread.is_alive():
            self._running = self._stack.enter_context(serving(self._built))
        return self._running

    def stop(self):
        """Leaves the engine to another server."""
        self._running = None
        self._stack.close()


@pytest.fixture(scope="session")
def shared_server(built_engine):
    shared = SharedServer(built_engine)
    yield shared
    shared.stop()


@pytest.fixture
def serve(built_engine, shared_server):
    """Starts a server with settings of the test's own; it ends with the test. Not beside `server`."""
    shared_server.stop()
    with contextlib.ExitStack() as stack:
        yield lambda **settings: stack.enter_context(serving(built_engine, **settings))


@pytest.fixture
def server(shared_server):
    """A server without settings; the test must leave nothing running."""
    shared = shared_server.running()
    yield shared
    if shared.thread.is_alive():
        shared.wait_until_idle()


@pytest.fixture
def http(server):
    with httpx.Client(base_url=server.url, timeout=60) as client:
        yield client


@pytest.fixture
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client


@pytest.fixture(scope="session")
def browser(tmp_path_factory):
    if EXECUTABLE is None:
        pytest.skip("no Chromium is installed")
    chromium = Chromium(tmp_path_factory.mktemp("chromium"))
    yield chromium
    chromium.close()


@pytest.fixture
def tab(browser):
    """A browser's tab with storage of its own; what goes wrong in the page fails the test."""
    tab = browser.new_tab()
    yield tab
    tab.close()
