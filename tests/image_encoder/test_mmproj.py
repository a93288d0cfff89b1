"""Models in GGUF that see: their towers in `mmproj` files, against the same models in safetensors."""

import json
import re

import gguf
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxis import LLM, SamplingParams
from jaxis.errors import CheckpointError, ConfigError
from jaxis.image_encoder.tower_source import MmprojTensors, tower_source
from jaxis.loading.gguf.mmproj import MmprojFile
from jaxis.loading.gguf_files import choose_mmproj
from jaxis.loading.open_checkpoint import read_hf_config
from jaxis.models.registry import model_class_of
from tests.support.mmproj_files import write_mmproj, write_text
from tests.support.vision_checkpoints import random_image
from tests.support.vision_families import FAMILIES

NAMES = ("Qwen3-VL", "Qwen2.5-VL", "Qwen2-VL", "Gemma 3", "SmolVLM")
ENGINE = {"max_num_batched_tokens": 96, "max_num_seqs": 4, "block_size": 16, "max_model_len": 512, "dtype": "float32"}
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=2)


def named(name):
    return next(each for each in FAMILIES if each.name == name)


@pytest.fixture(scope="module", params=NAMES)
def family(request):
    return named(request.param)


@pytest.fixture(scope="module")
def folder(family, tmp_path_factory):
    """The checkpoint; GGUF's norms of Gemma have 1 added, which here loses nothing."""
    folder = tmp_path_factory.mktemp("safetensors")
    family.write(folder)
    if family.name == "Gemma 3":
        tensors = load_file(folder / "model.safetensors")
        of_text = {name: each for name, each in tensors.items() if name.endswith("norm.weight") and each.ndim == 1}
        tensors |= {name: (each + 1) - 1 for name, each in of_text.items() if "post_layernorm" not in name}
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        # What a file of so few layers means.
        config = json.loads((folder / "config.json").read_text())
        config["text_config"]["query_pre_attn_scalar"] = config["text_config"]["head_dim"]
        (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def mmproj(folder, tmp_path_factory):
    path = tmp_path_factory.mktemp("mmproj") / "mmproj-tiny-F32.gguf"
    write_mmproj(folder, path)
    return path


def tower_tensors(folder):
    tower = model_class_of(read_hf_config(folder)).tower
    stored = load_file(folder / "model.safetensors")
    return {tower._plain_name(name): each for name, each in stored.items() if tower.has_tensor(name)}


def tensors_of(path, folder):
    tower = model_class_of(read_hf_config(folder)).tower
    with MmprojTensors(path) as tensors:
        return {tower._plain_name(name): np.array(each) for name, each in tensors.iterate()}


def test_its_tensors_are_those_of_the_checkpoint(folder, mmproj, tmp_path):
    expected = tower_tensors(folder)
    swapped = tmp_path / "mmproj-swapped.gguf"
    write_mmproj(folder, swapped, swap=True)
    for path in (mmproj, swapped):
        ours = tensors_of(path, folder)
        assert ours.keys() == expected.keys()
        for name, tensor in expected.items():
            np.testing.assert_array_equal(ours[name], tensor, err_msg=name)


def test_blocks_are_dequantized(folder, tmp_path):
    def quantize(name, tensor):
        if tensor.shape[-1] % 32:
            return None
        return gguf.quants.quantize(tensor, gguf.GGMLQuantizationType.Q8_0), gguf.GGMLQuantizationType.Q8_0

    path = tmp_path / "mmproj-Q8_0.gguf"
    write_mmproj(folder, path, quantize=quantize)
    expected, ours = tower_tensors(folder), tensors_of(path, folder)
    for name, tensor in expected.items():
        np.testing.assert_allclose(ours[name], tensor, rtol=0, atol=np.abs(tensor).max() / 200, err_msg=name)
    assert any((ours[name] != tensor).any() for name, tensor in expected.items())


def bits(output):
    [completion] = output.outputs
    return (
        output.prompt_token_ids,
        completion.token_ids,
        [{i: each.logprob.hex() for i, each in at.items()} for at in completion.logprobs],
    )


@pytest.mark.sampled
def test_a_model_in_gguf_sees_what_it_sees_in_safetensors(family, folder, mmproj, tmp_path):
    """Embeddings, the prompt's tokens, and log-probabilities, bit for bit."""
    path = tmp_path / "tiny-F32.gguf"
    (tmp_path / "work").mkdir()
    write_text(folder, path, tmp_path / "work")
    images = [random_image(30, 20, seed=1), random_image(64, 64, seed=2)]
    prompt = {"prompt": f"Look: {family.placeholder} and {family.placeholder}", "multi_modal_data": {"image": images}}
    chat = [{"role": "user", "content": [{"type": "image", "image": images[0]}, {"type": "text", "text": "What?"}]}]
    found = []
    for model, given in ((folder, {}), (path, {"mmproj": str(mmproj)})):
        with LLM(str(model), kv_cache_memory="4MiB", show_progress=False, **ENGINE, **given) as llm:
            encoder = llm.engine.runner.feature("inputs").encoder
            put = llm.images.put(llm._tokenize(prompt["prompt"], "the prompt"), images)
            encoder.hold(put.inputs)
            rows = np.concatenate([encoder.rows(each, llm.engine.runner.programs) for each in put.inputs])
            encoder.let_go(put.inputs)
            [generated], [answered] = llm.generate([prompt], GREEDY), llm.chat(chat, GREEDY)
            found.append((rows, bits(generated), bits(answered)))
    np.testing.assert_array_equal(found[0][0], found[1][0])
    assert found[0][1:] == found[1][1:]


@pytest.mark.parametrize(
    ("names", "chosen"),
    [
        (["a-Q4_K_M.gguf"], None),
        (["a-Q4_K_M.gguf", "mmproj-a-f16.gguf"], "mmproj-a-f16.gguf"),
        (["mmproj-F16.gguf", "mmproj-BF16.gguf", "mmproj-F32.gguf"], "mmproj-BF16.gguf"),
        (["a-mmproj-Q8_0.gguf", "a-mmproj-f32.gguf"], "a-mmproj-Q8_0.gguf"),
        (["mmproj-a-f16.gguf", "mmproj-b-f16.gguf"], None),
    ],
)
def test_one_of_several_types_is_chosen_and_none_of_several_models(names, chosen):
    assert choose_mmproj(names) == chosen


def test_what_is_not_the_models_is_refused_in_a_line(tmp_path):
    folder = tmp_path / "safetensors"
    folder.mkdir()
    named("SmolVLM").write(folder)
    config = read_hf_config(folder).get_text_config()
    model = tmp_path / "model-Q4_K_M.gguf"
    model.write_bytes(b"GGUF")
    for keys, error, message in (
        ({"projector_type": "glm4v"}, ConfigError, "of the kind 'glm4v'; supported are qwen2vl_merger, "),
        ({"vision__n_wa_pattern": 7}, ConfigError, "keys that jaxis does not know: clip.vision.n_wa_pattern"),
        ({"vision__patch_size": 0}, ConfigError, "patches of 0 pixels"),
        ({"vision__block_count": 4_000_000_000}, ConfigError, "has 4000000000 layers .* and has 2: download it again"),
        ({"vision__attention__head_count": 0}, ConfigError, "in 0 heads"),
        ({"vision__image_size": 2_000_000_000}, ConfigError, "images of 2000000000 pixels, and 64 places"),
        ({"vision__projector__scale_factor": 100}, ConfigError, "images of 32 pixels, and 64 places"),
        ({"vision__patch_size": None}, ConfigError, "lacks the key clip.vision.patch_size"),
        ({"vision__image_std": None}, ConfigError, "lacks clip.vision.image_mean or image_std"),
    ):
        path = tmp_path / "mmproj.gguf"
        write_mmproj(folder, path, **keys)
        with pytest.raises(error, match=message):
            tower_source(model, config, path, is_made_up=False)
        # One that nobody named is a reason to serve text.
        assert re.search(message, tower_source(model, config, None, is_made_up=False).reason)
    write_mmproj(folder, path)
    assert tower_source(model, config, None, is_made_up=False).mmproj == path
    larger = json.loads((folder / "config.json").read_text())["text_config"] | {"hidden_size": 128}
    with pytest.raises(ConfigError, match="makes embeddings of 64 elements, and the model's have 128"):
        tower_source(model, type(config)(larger, source="x"), path, is_made_up=False)
    with pytest.raises(ConfigError, match="is for models in GGUF files"):
        tower_source(folder, config, path, is_made_up=False)
    with pytest.raises(CheckpointError, match=r"is not a GGUF file|truncated"):
        MmprojFile(model)
