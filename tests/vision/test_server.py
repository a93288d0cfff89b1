"""Images in each protocol of a server, and on their way to an engine's process."""

import base64
import io

import anthropic
import httpx
import numpy as np
import ollama
import openai
import pytest
from PIL import Image

from jaxis import LLM, SamplingParams
from jaxis.engine.arguments import EngineArgs
from jaxis.engine.client import wire
from jaxis.engine.setup import build_engine
from jaxis.host.channel import encode
from jaxis.host.progress import ProgressDisplay
from jaxis.prompts import EmbeddedInput, TokenizedPrompt
from tests.server.conftest import serving
from tests.support.vision_checkpoints import random_image, write_mistral3
from tests.support.vision_families import FAMILIES

SIZES = {"max_num_batched_tokens": 48, "max_num_seqs": 4, "block_size": 16, "max_model_len": 512}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mistral3")
    write_mistral3(folder)
    return folder


def data_url(image):
    data = io.BytesIO()
    image.save(data, "PNG", compress_level=1)
    return "data:image/png;base64," + base64.b64encode(data.getvalue()).decode()


def body(url, role="user", text="What is it?"):
    parts = [{"type": "text", "text": text}, {"type": "image_url", "image_url": {"url": url, "detail": "auto"}}]
    return {"messages": [{"role": role, "content": parts}], "max_tokens": 8, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def server(folder):
    built = build_engine(EngineArgs(str(folder), kv_cache_memory="2MiB", **SIZES), ProgressDisplay(False))
    with serving(built) as server:
        yield server
    built.engine.close()


@pytest.fixture
def http(server):
    with httpx.Client(base_url=server.url, timeout=60) as client:
        yield client


@pytest.fixture(scope="module")
def expected(folder):
    """Answers conversations without a server."""
    with LLM(str(folder), kv_cache_memory="2MiB", show_progress=False, **SIZES) as llm:
        params = SamplingParams(temperature=0, max_tokens=8)
        yield lambda messages: llm.chat(messages, params)[0]


def base64_of(image):
    return data_url(image).partition(",")[2]


def answers_of(server, turns):
    """What the API clients of each protocol get for a conversation of `tool_turns` or of a question: texts by name.

    Args:
      server: The server.
      turns: Protocol -> the conversation in its words.
    """
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="x") as client:
        chat = client.chat.completions.create(model="", messages=turns["chat"], max_tokens=8, temperature=0)
        items = client.responses.create(model="", input=turns["responses"], max_output_tokens=8, temperature=0)
    with anthropic.Anthropic(base_url=server.url, api_key="x") as client:
        request = {"model": chat.model, "messages": turns["messages"]}
        message = client.messages.create(**request, max_tokens=8, extra_body={"temperature": 0})
        counted = client.messages.count_tokens(**request).input_tokens
    told = ollama.Client(server.url).chat(
        chat.model, turns["ollama"], options={"num_predict": 8, "temperature": 0}, stream=False
    )
    lengths = [chat.usage.prompt_tokens, items.usage.input_tokens, counted, told.prompt_eval_count]
    lengths.append(message.usage.input_tokens + message.usage.cache_read_input_tokens)
    assert len(set(lengths)) == 1
    text = "".join(block.text for block in message.content)
    return lengths[0], [chat.choices[0].message.content, items.output_text, text, told.message.content]


def test_each_protocol_takes_images(server, expected):
    image = random_image(40, 24, seed=1)
    texts = [{"type": "text", "text": "What is it?"}]
    source = {"type": "base64", "media_type": "image/png", "data": base64_of(image)}
    items = [{"type": "input_image", "image_url": data_url(image), "detail": "auto"}]
    turns = {
        "chat": [{"type": "image_url", "image_url": {"url": data_url(image)}}, *texts],
        "responses": [*items, {"type": "input_text", "text": "What is it?"}],
        "messages": [{"type": "image", "source": source}, *texts],
    }
    messages = {kind: [{"role": "user", "content": content}] for kind, content in turns.items()}
    messages["ollama"] = [{"role": "user", "content": "What is it?", "images": [base64_of(image)]}]
    output = expected([{"role": "user", "content": [{"type": "image", "image": image}, *texts]}])
    num_tokens, answers = answers_of(server, messages)
    assert num_tokens == len(output.prompt_token_ids)
    client = ollama.Client(server.url)
    options = {"num_predict": 8, "temperature": 0}
    [model] = client.list().models
    generated = client.generate(model.model, "What is it?", images=[base64_of(image)], options=options)
    assert {*answers, generated.response} == {output.outputs[0].text}
    assert "vision" in client.show(model.model).capabilities


def test_results_of_tools_have_images(server, expected):
    """This model's template writes no images there: they come in a message of their own, after all results."""
    images = [random_image(24, 40, seed=2), random_image(16, 16, seed=3)]
    urls, sources = list(map(data_url, images)), [base64_of(image) for image in images]
    question, done = {"role": "user", "content": "Look."}, {"role": "user", "content": "And?"}
    calls = [{"id": f"abcde123{i}", "type": "function", "function": {"name": "f", "arguments": "{}"}} for i in "45"]
    of_ollama = [{"function": {"name": "f", "arguments": {}}}] * 2
    results = [{"type": "text", "text": "Here."}, {"type": "text", "text": "There."}]
    blocks = [{"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": x}} for x in sources]
    turns = {
        "chat": [
            question,
            {"role": "assistant", "content": None, "tool_calls": calls},
            *(
                {
                    "role": "tool",
                    "tool_call_id": call["id"],
                    "content": [text, {"type": "image_url", "image_url": {"url": url}}],
                }
                for call, text, url in zip(calls, results, urls, strict=True)
            ),
            done,
        ],
        "responses": [
            question,
            *({"type": "function_call", "call_id": call["id"], **call["function"]} for call in calls),
            *(
                {
                    "type": "function_call_output",
                    "call_id": call["id"],
                    "output": [{**text, "type": "input_text"}, {"type": "input_image", "image_url": url}],
                }
                for call, text, url in zip(calls, results, urls, strict=True)
            ),
            done,
        ],
        "messages": [
            question,
            {
                "role": "assistant",
                "content": [{"type": "tool_use", "id": call["id"], "name": "f", "input": {}} for call in calls],
            },
            {
                "role": "user",
                "content": [
                    *(
                        {"type": "tool_result", "tool_use_id": call["id"], "content": [text, block]}
                        for call, text, block in zip(calls, results, blocks, strict=True)
                    ),
                    {"type": "text", "text": "And?"},
                ],
            },
        ],
        "ollama": [
            question,
            {"role": "assistant", "content": "", "tool_calls": of_ollama},
            *(
                {"role": "tool", "tool_name": "f", "content": text["text"], "images": [source]}
                for text, source in zip(results, sources, strict=True)
            ),
            done,
        ],
    }
    output = expected(
        [
            question,
            {"role": "assistant", "content": None, "tool_calls": calls},
            {"role": "tool", "content": "Here."},
            {"role": "tool", "content": "There."},
            {"role": "user", "content": [{"type": "image", "image": image} for image in images]},
            done,
        ]
    )
    num_tokens, answers = answers_of(server, turns)
    assert num_tokens == len(output.prompt_token_ids)
    assert set(answers) == {output.outputs[0].text}


def test_chat_completions_take_images(http, folder):
    image = random_image(40, 24)
    answers = [http.post("/v1/chat/completions", json=body(data_url(image))).json() for _ in range(2)]
    assert answers[0]["choices"] == answers[1]["choices"]
    assert answers[1]["usage"]["prompt_tokens_details"]["cached_tokens"] >= 16
    tokens = http.post("/tokenize", json={"messages": body(data_url(image))["messages"]}).json()
    assert tokens["count"] == answers[0]["usage"]["prompt_tokens"]
    refused = {
        "nothing is fetched": body("https://example.com/a.png"),
        "must be a data: URL": body(str(folder / "config.json")),
        "not an image": body("data:image/png;base64,aGFsbG8="),
        "only messages of the user": body(data_url(image), role="system"),
        "2 place": body(data_url(image), text="[IMG]"),
    }
    for words, wrong in refused.items():
        response = http.post("/v1/chat/completions", json=wrong)
        message = response.json()["error"]["message"]
        assert response.status_code == 400
        assert words in message
        assert "\n" not in message
    rendered = http.post("/v1/chat/completions/render", json=body(data_url(image)))
    assert (rendered.status_code, "no part of a rendered prompt" in rendered.text) == (400, True)
    assert http.get("/v1/models").json()["data"][0]["input_modalities"] == ["text", "image"]


@pytest.mark.parametrize(
    ("path", "more", "words"),
    [
        ("/v1/responses", {"type": "input_image", "image_url": "https://example.com/a.png"}, "nothing is fetched"),
        ("/v1/responses", {"type": "input_image", "file_id": "file-1"}, "file_id"),
        ("/v1/responses", {"type": "image_url", "image_url": "data:x"}, "an image's type is input_image here"),
        ("/v1/messages", {"type": "image", "source": {"type": "url", "url": "http://10.0.0.1/"}}, "nothing is fetched"),
        ("/v1/messages", {"type": "image", "source": {"type": "file", "file_id": "f"}}, "known are base64, url"),
        ("/v1/messages", {"type": "image", "source": {"type": "base64", "data": "!!!!"}}, "not valid base64"),
        ("/v1/messages", {"type": "image", "source": {"type": "base64", "data": "aa%2B"}}, "not valid base64"),
        ("/v1/chat/completions", {"type": "image", "image": "data:x"}, "an image's type is image_url here"),
        ("/v1/chat/completions", {"type": "video", "video": ["data:x"]}, "does not support video input: send images"),
        ("/v1/chat/completions", {"type": "video_url", "video_url": {"url": "x"}}, "does not support video input"),
        ("/api/chat", "aGk=", "is not an image"),
    ],
)
def test_what_is_no_image_is_one_line(http, path, more, words):
    message = {"role": "user", "content": [more]}
    if path == "/api/chat":
        message = {"role": "user", "content": "", "images": [more]}
    request = {"model": "", "max_tokens": 1, "messages": [message]}
    if path == "/v1/responses":
        request = {"input": [message]}
    if path == "/v1/messages":
        request["model"] = http.get("/v1/models").json()["data"][0]["id"]
    response = http.post(path, json=request)
    assert response.status_code == 400
    assert words in response.text
    assert "\\n" not in response.text


def test_a_server_of_a_text_model_refuses_images(client_of_text_model):
    response = client_of_text_model.post("/v1/chat/completions", json=body(data_url(random_image(8, 8))))
    assert response.status_code == 400
    place = "messages[0].content[1].image_url.url"
    assert response.json()["error"]["message"] == f"{place}: this model does not support image input: send text"
    message = {"role": "user", "content": [{"type": "video", "video": ["data:x"]}]}
    response = client_of_text_model.post("/v1/chat/completions", json={"messages": [message]})
    assert response.status_code == 400
    assert "this model does not support video input: send text" in response.json()["error"]["message"]


@pytest.fixture
def client_of_text_model():
    built = build_engine(EngineArgs(kv_cache_memory="4MiB", max_num_seqs=2), ProgressDisplay(False))
    with serving(built) as server, httpx.Client(base_url=server.url, timeout=60) as client:
        yield client
    built.engine.close()


def test_a_screenshot_of_many_megabytes_is_taken_where_a_model_sees_alone(http, client_of_text_model):
    noise = np.random.default_rng(0).integers(0, 256, (1500, 1500, 3), np.uint8)
    large = body(data_url(Image.fromarray(noise)))
    large["max_tokens"] = 1
    assert len(large["messages"][0]["content"][1]["image_url"]["url"]) > 8 * 2**20
    assert http.post("/v1/chat/completions", json=large).status_code == 200
    refused = client_of_text_model.post("/v1/chat/completions", json=large)
    assert refused.status_code == 413
    assert f"larger than the {8 * 2**20} bytes" in refused.json()["error"]["message"]
    assert "--max-body-size" in refused.json()["error"]["message"]


def test_inputs_reach_the_engines_process_as_they_are():
    pixels = np.arange(48, dtype=np.uint8)
    item = EmbeddedInput(b"d" * 32, 3, 4, (0, 1, 3), (4, 4, 3), pixels.tobytes())
    command = wire.AddRequest("r", TokenizedPrompt(None, [1] * 9, inputs=(item,)), SamplingParams())
    received = wire.COMMANDS.decode(encode(command))
    [again] = received.prompt.inputs
    assert vars(again) == vars(item)


def image_parts(*urls):
    """A user's message with words before, between and after the images."""
    see, question = ({"type": "text", "text": text} for text in ("See: ", "What is it?"))
    parts = [part for url in urls for part in (see, {"type": "image_url", "image_url": url})]
    return [{"role": "user", "content": [*parts, question]}]


@pytest.mark.parametrize(
    "name",
    [
        "Mistral Large 4",
        *(
            pytest.param(each, marks=pytest.mark.slow)
            for each in ("Qwen3.8-Flash-Next", "MiniMax M3", "GLM-5.3-Flash", "Kimi K3")
        ),
    ],
)
def test_openai_clients_send_images_to_a_family(name, tmp_path):
    """Whole and streamed: the answer of `LLM.chat`, its prompt's tokens; too many images are refused in a line."""
    [family] = (each for each in FAMILIES if each.name == name)
    family.write(tmp_path)
    settings = SIZES | {"kv_cache_memory": "4MiB", "limit_mm_per_prompt": {"image": 2}}
    images = [random_image(40, 24, seed=1), random_image(9, 57, seed=2)]
    urls = [{"url": data_url(image), "detail": "auto"} for image in images]
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    with LLM(str(tmp_path), show_progress=False, **settings) as llm:
        expected = [llm.chat(image_parts(*each), params)[0] for each in (urls[:1], urls)]
    # An image's tokens are counted: the second one's beside its text and its placeholder.
    counts = [len(output.prompt_token_ids) for output in expected]
    assert counts[1] - counts[0] > len("See: ") + 1
    settings["max_model_len"] = counts[1] + 12
    built = build_engine(EngineArgs(str(tmp_path), **settings), ProgressDisplay(False))
    with serving(built) as server, openai.OpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0) as client:
        request = {"model": "", "max_tokens": 12, "temperature": 0, "extra_body": {"ignore_eos": True}}
        for count, output in zip((1, 2), expected, strict=True):
            asked = request | {"messages": image_parts(*urls[:count])}
            whole = client.chat.completions.create(**asked)
            chunks = list(client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
            streamed = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
            assert whole.choices[0].message.content == streamed == output.outputs[0].text
            assert whole.usage.prompt_tokens == chunks[-1].usage.prompt_tokens == len(output.prompt_token_ids)
            assert whole.usage.completion_tokens == chunks[-1].usage.completion_tokens == 12
        large = {"url": data_url(random_image(1600, 1600))}
        refused = {
            "the prompt has 3 images, and at most 2 are taken": [*urls, urls[0]],
            "maximum context length": [large, large],
        }
        for words, sent in refused.items():
            with pytest.raises(openai.BadRequestError, match=words) as error:
                client.chat.completions.create(**request, messages=image_parts(*sent))
            assert "\n" not in error.value.body["message"]
    built.engine.close()
