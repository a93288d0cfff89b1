"""Models whose vision tower is left out: a request with an image is told the reason, in every protocol."""

import json
import shutil

import httpx
import pytest
from safetensors.numpy import load_file, save_file

from jaxis import LLM, SamplingParams
from jaxis.config.hf_config import HFConfig
from jaxis.engine.arguments import EngineArgs
from jaxis.engine.execution.extra_memory import LeftOut
from jaxis.engine.setup import build_engine
from jaxis.errors import RequestError
from jaxis.host.progress import ProgressDisplay
from jaxis.image_encoder import encoder_memory as memory
from jaxis.image_encoder.tower_source import tower_source
from jaxis.loading.open_checkpoint import read_hf_config
from tests.server.conftest import serving
from tests.support.vision_checkpoints import random_image
from tests.support.vision_families import FAMILIES
from tests.vision.test_server import base64_of, data_url

SIZES = {"max_num_seqs": 4, "block_size": 16, "max_model_len": 128, "kv_cache_memory": "2MiB"}
SHORT = SamplingParams(temperature=0, max_tokens=2)
IMAGE = random_image(24, 24)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gemma3")
    next(each for each in FAMILIES if each.name == "Gemma 3").write(folder)
    return folder


def copy_of(folder, path, **files):
    """A copy of the checkpoint, with other contents of files, or without them (None)."""
    shutil.copytree(folder, path, dirs_exist_ok=True)
    for name, contents in files.items():
        (path / f"{name}.json").write_text(json.dumps(contents)) if contents else (path / f"{name}.json").unlink()
    return path


def without_tower(folder, path):
    tensors = load_file(copy_of(folder, path) / "model.safetensors")
    of_text = {name: each for name, each in tensors.items() if "vision" not in name and "projector" not in name}
    save_file(of_text, path / "model.safetensors", {"format": "pt"})
    return path


CASES = {
    "a step is shorter than an image": (
        lambda folder, _: {"model": folder, "max_num_batched_tokens": 16},
        "images need max_num_batched_tokens >= 19 (it is 16): raise --max-num-batched-tokens",
    ),
    "the user chose so": (
        lambda folder, _: {"model": folder, "limit_mm_per_prompt": {"image": 0}},
        "limit_mm_per_prompt allows no images: raise --limit-mm-per-prompt, or send text",
    ),
    "no processor": (
        lambda folder, path: {"model": copy_of(folder, path, processor_config=None, preprocessor_config=None)},
        "images need a preprocessor_config.json, and the checkpoint has none: add that of the model",
    ),
    "an unknown processor": (
        lambda folder, path: {
            "model": copy_of(
                folder, path, processor_config=None, preprocessor_config={"processor_class": "GemmoProcessor"}
            )
        },
        "images need an image processor that jaxis knows, and the checkpoint's is GemmoProcessor",
    ),
    "no tower": (
        lambda folder, path: {"model": without_tower(folder, path)},
        "the checkpoint's files have no vision tower",
    ),
    "Pillow is missing": (
        lambda folder, _: {"model": folder},
        "images need Pillow: pip install 'jaxis[vision]'",
    ),
}


def requests(model):
    """Path -> a request with an image, and its place in the request."""
    url, text = data_url(IMAGE), {"type": "text", "text": "What?"}
    source = {"type": "base64", "media_type": "image/png", "data": base64_of(IMAGE)}
    chat = [text, {"type": "image_url", "image_url": {"url": url}}]
    items = [{"type": "input_text", "text": "What?"}, {"type": "input_image", "image_url": url}]
    ask = {"model": model, "max_tokens": 1}
    return {
        "/v1/chat/completions": ask | {"messages": [{"role": "user", "content": chat}]},
        "/v1/responses": {"model": model, "input": [{"role": "user", "content": items}]},
        "/v1/messages": ask | {"messages": [{"role": "user", "content": [text, {"type": "image", "source": source}]}]},
        "/api/chat": ask | {"messages": [{"role": "user", "content": "What?", "images": [base64_of(IMAGE)]}]},
    }


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", CASES)
def test_requests_are_told_the_reason(folder, tmp_path, monkeypatch, capsys, name):
    make_arguments, reason = CASES[name]
    arguments = make_arguments(folder, tmp_path)
    if name == "Pillow is missing":
        monkeypatch.setattr(memory, "missing_module", lambda extra: "PIL")
    args = EngineArgs(**SIZES | arguments | {"model": str(arguments["model"])})
    built = build_engine(args, ProgressDisplay(True))
    assert (reason in capsys.readouterr().err) == (name != "the user chose so")
    with serving(built) as server, httpx.Client(base_url=server.url, timeout=60) as client:
        [model] = client.get("/v1/models").json()["data"]
        assert model["input_modalities"] == ["text"]
        for path, request in requests(model["id"]).items():
            response = client.post(path, json=request)
            error = response.json()["error"]
            message = error if isinstance(error, str) else error["message"]
            assert (response.status_code, message.partition(": ")[2]) == (400, reason)
        video = {"messages": [{"role": "user", "content": [{"type": "video", "video": [data_url(IMAGE)]}]}]}
        error = client.post("/v1/chat/completions", json=video).json()["error"]["message"]
        assert error == f"messages[0].content[0].video: {reason}"
    built.engine.close()


def test_the_step_that_the_reason_names_is_long_enough(folder):
    messages = [{"role": "user", "content": [{"type": "image", "image": IMAGE}, {"type": "text", "text": "What?"}]}]
    for tokens in (18, 19):
        with LLM(str(folder), **SIZES, max_num_batched_tokens=tokens, show_progress=False) as llm:
            if tokens == 19:
                assert llm.chat(messages, SHORT)[0].outputs[0].token_ids
                return
            with pytest.raises(RequestError, match=r"^images need max_num_batched_tokens >= 19 \(it is 18\): raise"):
                llm.chat(messages, SHORT)
            prompt = {"prompt": "<start_of_image>", "multi_modal_data": {"image": IMAGE}}
            with pytest.raises(RequestError, match=r"images need max_num_batched_tokens >= 19 \(it is 18\)"):
                llm.generate(prompt, SHORT)
            assert llm.chat([{"role": "user", "content": "What?"}], SHORT)


@pytest.mark.parametrize("name", ["pipeline_parallel_size", "nnodes"])
def test_stages_and_hosts_are_named(folder, name):
    more = {"master_addr": "127.0.0.1", "tensor_parallel_size": 2} if name == "nnodes" else {}
    args = EngineArgs(str(folder), **{name: 2}, **more)
    found = memory.make_memory(args, folder, read_hf_config(folder), None, lambda _: None)
    option = name.replace("_", "-")
    assert found.left_out == LeftOut(f"images do not combine with {name}=2: leave out --{option}", is_chosen=False)


def test_files_of_text_are_no_mistake(tmp_path):
    model = tmp_path / "model.gguf"
    model.write_bytes(b"GGUF")
    config = HFConfig({"architectures": ["MllamaForConditionalGeneration"]}, source="config.json")
    text = HFConfig({"architectures": ["LlamaForCausalLM"]}, source="config.json")
    for path, hf_config, reason in (
        (model, text, "images need an mmproj file, and none lies beside the GGUF file: give it with --mmproj"),
        (tmp_path, config, "jaxis has the text part of this model only: send text"),
        (tmp_path, text, ""),
    ):
        assert tower_source(path, hf_config, None, is_made_up=False) == LeftOut(reason, is_chosen=True)
