"""A server of several models whose engines are fake: a test says when they load, what they take, and when they step."""

from __future__ import annotations

import contextlib
import dataclasses
import threading

import httpx

from jaxis.engine.client.async_llm_engine import AsyncLLMEngine
from jaxis.server.config import ServerConfig
from jaxis.server.run import make_models_server
from jaxis.server.several.model_settings import ModelSettings, PoolLimits
from jaxis.server.several.pool import ModelPool
from tests.support.fake_engine import fake_built_engine
from tests.support.local_engine import LocalEngine
from tests.support.running_server import running
from tests.support.waiting import wait_until

GIB = 1 << 30


class FakeModel:
    """A model of a pool.

    Attributes:
      settings: Settings that the pool knows of it.
      needed_bytes: Memory that its engine says it will take.
      may_load, may_step: Loading, and each step, waits for these.
      num_loads: Loads that have begun.
      error: Raised in place of an engine.
      built: Its engine is one in this process; None makes a fake one for each load.
    """

    def __init__(self, name, *, needed_bytes=GIB, built=None, aliases=(), **settings):
        config = ServerConfig(served_model_names=(name,), model_aliases=aliases)
        self.settings = ModelSettings(config=config, **settings)
        self.needed_bytes = needed_bytes
        self.may_load, self.may_step = threading.Event(), threading.Event()
        self.may_load.set()
        self.may_step.set()
        self.num_loads = 0
        self.error = None
        self.built = built

    def start(self, admit):
        self.num_loads += 1
        admit(self.needed_bytes)
        assert self.may_load.wait(60)
        if self.error is not None:
            raise self.error
        built = self.built or fake_built_engine()
        if self.built is None:
            built.engine.before_step = lambda: self.may_step.wait(60)
        return AsyncLLMEngine(LocalEngine(built), max_queued=512, stall_seconds=120.0)


class PoolClient:
    """Asks a server of several models."""

    def __init__(self, url, models, server):
        self.server = server
        self.http = httpx.Client(base_url=url, timeout=60)
        self.url = url
        self.models = {model.settings.name: model for model in models}

    def close(self):
        """Lets every model load and step, so that the server ends."""
        for model in self.models.values():
            model.may_load.set()
            model.may_step.set()
        self.http.close()

    def ask(self, name, **more):
        """A whole answer of one token."""
        body = {"model": name, "prompt": [1], "max_tokens": 1, **more}
        return self.http.post("/v1/completions", json=body)

    def asking(self, name, **more):
        """The same in a thread; call the result to get the answer."""
        return in_thread(lambda: self.ask(name, **more))

    def states(self):
        """Model -> its state."""
        return {card["id"]: card["status"]["value"] for card in self.http.get("/v1/models").json()["data"]}

    def loaded(self):
        """The models that are loaded."""
        return {name for name, state in self.states().items() if state == "loaded"}

    def wait_for(self, name, state):
        """Waits until a model is in a state."""
        wait_until(lambda: self.states()[name] == state)


def in_thread(function):
    """Calls a function in a thread; call the result to get the function's."""
    results = []
    thread = threading.Thread(target=lambda: results.append(function()), daemon=True)
    thread.start()

    def result():
        thread.join(60)
        return results[0]

    return result


@contextlib.contextmanager
def serving_pool(*models, free_bytes=1000 * GIB, most_loaded=None, **settings):
    """A client of a server of models."""
    by_name = {model.settings.name: model for model in models}
    config = ServerConfig(**{"drain_seconds": 1.0} | settings)

    def start_engine(of_model, budget, admit):
        assert budget.total_bytes == free_bytes
        return by_name[of_model.name].start(admit)

    own = [dataclasses.replace(model.settings, config=_own(config, model.settings.config)) for model in models]
    pool = ModelPool(own, PoolLimits(free_bytes=free_bytes, most_loaded=most_loaded), start_engine)
    server = make_models_server(pool, config)
    with running(server) as (url, _), contextlib.closing(PoolClient(url, models, server)) as client:
        yield client


def _own(config, own):
    names = {"served_model_names": own.served_model_names, "model_aliases": own.model_aliases}
    return dataclasses.replace(config, **names)
