"""Decoders that crash, loop, take memory or lie: each costs its request one clear error, and others go on."""

import base64
import io
from concurrent.futures import ThreadPoolExecutor

import httpx
import numpy as np
import pytest

from jaxis.engine.arguments import EngineArgs
from jaxis.engine.setup import build_engine
from jaxis.errors import RequestError
from jaxis.host.limited_process import LimitedProcesses
from jaxis.host.progress import ProgressDisplay
from jaxis.vision import decode
from tests.server.conftest import serving
from tests.support.vision_checkpoints import random_image, write_mistral3

# Does as real decoders might that a file has taken over; decodes what does not end like this.
HOSTILE = """
import importlib.util, os, signal

spec = importlib.util.spec_from_file_location("image_worker", {file!r})
real = importlib.util.module_from_spec(spec)
spec.loader.exec_module(real)

def answer(request, data):
    match bytes(data[-4:]):
        case b"segv":
            os.kill(os.getpid(), signal.SIGSEGV)
        case b"bus!":
            os.kill(os.getpid(), signal.SIGBUS)
        case b"loop":
            while True:
                pass
        case b"mem!":
            return {{}}, 0, (bytearray(1 << 40),)
        case b"long":
            return {{"size": [4, 4]}}, 1 << 60, (b"abc",)
        case b"less":
            return {{"size": [4, 4]}}, 3, (b"abc",)
        case b"neg!":
            return {{"size": [-4, -4]}}, 0, ()
        case b"text":
            return {{"refused": 5}}, 0, ()
        case b"list":
            return [1], 0, ()
        case b"late" if request["pixels"]:
            os.kill(os.getpid(), signal.SIGSEGV)
    return real.answer(request, data)
"""
BROKEN = "cannot be decoded: the file is broken"
MEMORY = "is broken, or takes more than 1536 MiB to decode: make it smaller"
OUTCOMES = {
    "segv": MEMORY,
    "bus!": BROKEN,
    "loop": "takes more than 1 s of processor time to decode: make it smaller",
    "mem!": MEMORY,
    "long": BROKEN,
    "less": BROKEN,
    "neg!": BROKEN,
    "text": BROKEN,
    "list": BROKEN,
    "late": MEMORY,
}


def png(seed=0, end=""):
    data = io.BytesIO()
    random_image(12, 9, seed=seed).save(data, "PNG")
    return data.getvalue() + end.encode()


def read(source):
    return decode.decode_image(decode.open_image(source, "image 2 of 3"), "image 2 of 3")


@pytest.fixture
def decoders(monkeypatch, tmp_path):
    worker = tmp_path / "worker.py"
    worker.write_text(HOSTILE.format(file=decode.__file__.replace("decode.py", "image_worker.py")))
    decoders = LimitedProcesses(worker, large_bytes=1 << 20, max_running=1)
    monkeypatch.setattr(decode, "DECODERS", decoders)
    monkeypatch.setattr(decode, "MAX_SECONDS", 1)
    yield decoders
    decoders.close()


def test_a_decoder_that_fails_is_one_line_and_the_next_image_is_read(decoders):
    expected = np.asarray(random_image(12, 9, seed=1))
    for end, words in OUTCOMES.items():
        with pytest.raises(RequestError) as error:
            read(png(end=end))
        assert str(error.value) == f"image 2 of 3 {words}"
        np.testing.assert_array_equal(np.asarray(read(png(1))), expected)


def test_a_server_goes_on_beside_decoders_that_fail(decoders, tmp_path):
    (tmp_path / "model").mkdir()
    write_mistral3(tmp_path / "model")
    sizes = {"max_num_batched_tokens": 48, "max_num_seqs": 4, "block_size": 16, "max_model_len": 512}
    built = build_engine(EngineArgs(str(tmp_path / "model"), kv_cache_memory="2MiB", **sizes), ProgressDisplay(False))
    ends = ("segv", "loop", "less", "late")
    files = [png(1)] + [each for end in ends for each in (png(end=end), png(1))]
    with serving(built) as server, httpx.Client(base_url=server.url, timeout=60) as client:

        def ask(file):
            url = "data:image/png;base64," + base64.b64encode(file).decode()
            messages = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}]
            body = {"messages": messages, "max_tokens": 4, "temperature": 0, "ignore_eos": True}
            response = client.post("/v1/chat/completions", json=body)
            if response.status_code == 200:
                return response.json()["choices"][0]["message"]["content"]
            assert response.status_code == 400
            return response.json()["error"]["message"]

        with ThreadPoolExecutor(6) as threads:
            first, *answers = threads.map(ask, files)
        server.wait_until_idle()
    built.engine.close()
    assert answers[1::2] == [first] * len(ends)
    assert answers[::2] == [f"the image {OUTCOMES[end]}" for end in ends]
