"""Images in chat completions of a server, and on their way to an engine's process."""

import base64
import io

import httpx
import numpy as np
import pytest

from jaxis import LLM, SamplingParams
from jaxis.engine.arguments import EngineArgs
from jaxis.engine.frontend import wire
from jaxis.engine.frontend.engine_client import Submission
from jaxis.engine.setup import build_engine
from jaxis.host.channel import encode
from jaxis.host.progress import ProgressDisplay
from jaxis.prompts import EmbeddedInput, TokenizedPrompt
from tests.server.conftest import serving
from tests.support.vision_checkpoints import random_image, write_mistral3

SIZES = {"max_num_batched_tokens": 48, "max_num_seqs": 4, "block_size": 16, "max_model_len": 512}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mistral3")
    write_mistral3(folder)
    return folder


def data_url(image):
    data = io.BytesIO()
    image.save(data, "PNG")
    return "data:image/png;base64," + base64.b64encode(data.getvalue()).decode()


def body(url, role="user", text="What is it?"):
    parts = [{"type": "text", "text": text}, {"type": "image_url", "image_url": {"url": url, "detail": "auto"}}]
    return {"messages": [{"role": role, "content": parts}], "max_tokens": 8, "temperature": 0, "ignore_eos": True}


def test_chat_completions_take_images(folder):
    image = random_image(40, 24)
    built = build_engine(EngineArgs(str(folder), kv_cache_memory="2MiB", **SIZES), ProgressDisplay(False))
    try:
        with serving(built) as server, httpx.Client(base_url=server.url, timeout=60) as client:
            answers = [client.post("/v1/chat/completions", json=body(data_url(image))).json() for _ in range(2)]
            refused = [
                client.post("/v1/chat/completions", json=wrong)
                for wrong in (
                    body("https://example.com/a.png"),
                    body(str(folder / "config.json")),
                    body("data:image/png;base64,aGFsbG8="),
                    body(data_url(image), role="system"),
                    body(data_url(image), text="[IMG]"),
                )
            ]
            tokens = client.post("/tokenize", json={"messages": body(data_url(image))["messages"]}).json()
            card = client.get("/v1/models").json()["data"][0]
    finally:
        built.engine.close()
    with LLM(str(folder), kv_cache_memory="2MiB", show_progress=False, **SIZES) as llm:
        parts = [{"type": "text", "text": "What is it?"}, {"type": "image", "image": image}]
        params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
        [expected] = llm.chat([{"role": "user", "content": parts}], params)
    for answer in answers:
        assert answer["choices"][0]["message"]["content"] == expected.outputs[0].text
        assert answer["usage"]["prompt_tokens"] == len(expected.prompt_token_ids) == tokens["count"]
    assert answers[1]["usage"]["prompt_tokens_details"]["cached_tokens"] >= 16
    assert [response.status_code for response in refused] == [400] * 5
    messages = [response.json()["error"]["message"] for response in refused]
    for message, part in zip(
        messages, ("fetched", "fetched", "not an image", "only messages of the user", "2 place"), strict=True
    ):
        assert part in message
        assert "\n" not in message
    assert card["input_modalities"] == ["text", "image"]


def test_a_server_of_a_text_model_refuses_images(client_of_text_model):
    response = client_of_text_model.post("/v1/chat/completions", json=body(data_url(random_image(8, 8))))
    assert response.status_code == 400
    assert "this model does not support image input" in response.json()["error"]["message"]


@pytest.fixture
def client_of_text_model():
    built = build_engine(EngineArgs(kv_cache_memory="4MiB", max_num_seqs=2), ProgressDisplay(False))
    with serving(built) as server, httpx.Client(base_url=server.url, timeout=60) as client:
        yield client
    built.engine.close()


def test_inputs_reach_the_engines_process_as_they_are():
    pixels = np.arange(48, dtype=np.uint8)
    item = EmbeddedInput(b"d" * 32, 3, 4, (0, 1, 3), (4, 4, 3), pixels.tobytes())
    command = wire.AddRequest.of(Submission("r", TokenizedPrompt(None, [1] * 9, inputs=(item,)), SamplingParams()))
    received = wire.COMMANDS.decode(encode(command))
    [again] = received.prompt.inputs
    assert vars(again) == vars(item)
