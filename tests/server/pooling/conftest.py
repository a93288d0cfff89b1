"""A server of a small encoder, in a thread, and clients for it."""

from __future__ import annotations

import contextlib

import httpx
import pytest

from jaxis import LLM
from jaxis.pooling.async_pooling import AsyncPoolingEngine
from jaxis.server.config import ServerConfig
from jaxis.server.run import make_server
from tests.support.encoder_checkpoints import save_model, save_pooling
from tests.support.local_engine import LocalPooling
from tests.support.running_server import running


@contextlib.contextmanager
def serving(llm, **settings):
    """The URL of a server of an `LLM` that makes vectors."""
    config = ServerConfig(**{"drain_seconds": 1.0, "webui": False} | settings)
    engine = AsyncPoolingEngine(
        LocalPooling(llm._embedder), max_queued=config.max_queued, stall_seconds=config.stall_seconds
    )
    with running(make_server(engine, config)) as (url, _):
        yield url


@pytest.fixture(scope="session")
def encoder(tmp_path_factory):
    """(folder, the model in the reference)"""
    folder = tmp_path_factory.mktemp("served-encoder")
    model = save_model(folder)
    save_pooling(folder, max_seq_length=64)
    return folder, model


@pytest.fixture(scope="session")
def llm(encoder):
    with LLM(encoder[0], show_progress=False, max_num_batched_tokens=256, max_num_seqs=16) as llm:
        yield llm


@pytest.fixture(scope="session")
def url(llm):
    with serving(llm) as url:
        yield url


@pytest.fixture
def http(url):
    with httpx.Client(base_url=url, timeout=60) as client:
        yield client
