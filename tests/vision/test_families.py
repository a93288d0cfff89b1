"""Each family that takes images, tiny, against transformers: pixels, tokens, embeddings and answers."""

import json

import numpy as np
import pytest
import torch
from PIL import Image
from transformers.image_transforms import convert_to_rgb

from jaxis import LLM, SamplingParams
from jaxis.bringup.verify.compare import GATES
from jaxis.bringup.verify.images import ask_about_image, check_images
from jaxis.bringup.verify.reference import Reference
from jaxis.config import ModelConfig, VllmConfig
from jaxis.config.hf_config import HFConfig
from jaxis.image_encoder.encoder_memory import _config_of_tower
from jaxis.loading.open_checkpoint import open_checkpoint
from jaxis.models.model_loader import construct_abstractly
from jaxis.models.registry import model_class_of
from jaxis.tokenizer import Tokenizer
from jaxis.vision.decode import decode_image, open_image
from jaxis.vision.processors import read_processor
from tests.support.vision_checkpoints import random_image
from tests.support.vision_families import FAMILIES
from tests.vision.vision_modes import IMAGES_BY_MODE

SIZES = ((30, 20), (64, 64), (9, 57))
ENGINE = {"max_num_batched_tokens": 96, "max_num_seqs": 4, "block_size": 16, "max_model_len": 768}
GREEDY = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True, logprobs=0)
SHORT = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, logprobs=0)


@pytest.fixture(
    scope="module",
    params=[pytest.param(each, id=each.name, marks=[pytest.mark.slow] * each.slow) for each in FAMILIES],
)
def family(request):
    return request.param


@pytest.fixture(scope="module")
def reference(family, tmp_path_factory):
    folder = tmp_path_factory.mktemp("family")
    return family.write(folder), folder


@pytest.fixture(scope="module")
def llm(reference):
    with LLM(str(reference[1]), kv_cache_memory="4MiB", show_progress=False, **ENGINE) as llm:
        yield llm


class Recorder:
    """A quantization that notes the names of the layers that it is asked about, and changes none."""

    def __init__(self):
        self.names = []

    def get_quant_method(self, layer, prefix):
        del layer
        self.names.append(prefix)

    def check_all_used(self):
        pass


def bits(output):
    """Tokens, and log-probabilities bit for bit."""
    [completion] = output.outputs
    return completion.token_ids, [{i: each.logprob.hex() for i, each in at.items()} for at in completion.logprobs]


def text_of(placeholders):
    return "What is it?\n" + "\nand ".join(placeholders)


def check_pixels(family, ours, image, upright):
    """An image's pixels are the reference's; `upright` is the image as it is decoded."""
    scale = ours.pixel_scale
    expected = family.views(family.prepared([image]), 0)
    views = [view for part in ours.parts(upright) for view in part.views]
    for view, pixels in zip(views, expected, strict=True):
        assert view.shape[:2] == pixels.shape[1:], image.size
        if view.shape[2] == 4:
            view = np.where(view[..., 3:] > 0, view[..., :3].astype(np.int16), -1)
        unscaled = pixels.transpose(1, 2, 0) * scale.std + scale.mean
        np.testing.assert_array_equal(view, np.rint(unscaled * 255).astype(view.dtype), err_msg=str(image))
        scaled = (view * scale.factor - scale.mean) / scale.std
        np.testing.assert_allclose(scaled.transpose(2, 0, 1), pixels, rtol=0, atol=1e-6)


def random_sizes(count, seed):
    rng = np.random.default_rng(seed)
    return [tuple(int(2 ** rng.uniform(2, 8)) for _ in range(2)) for _ in range(count)]


def test_pixels_are_those_of_the_reference(family, reference):
    ours = read_processor(reference[1], Tokenizer.from_path(reference[1]))
    for i, size in enumerate(random_sizes(60, 0)):
        image = random_image(*size, seed=i)
        check_pixels(family, ours, image, image)


def test_linear_layers_are_called_as_in_the_checkpoint(family, reference):
    """A quantized checkpoint says by these names which layers it quantized."""
    folder, recorder = reference[1], Recorder()
    config = HFConfig(json.loads((folder / "config.json").read_text()), source=str(folder))
    tower = model_class_of(config).tower
    chosen = _config_of_tower(VllmConfig(ModelConfig(model=str(folder), hf_config=config)), config, recorder)
    construct_abstractly(chosen, model_class=tower)
    with open_checkpoint(folder) as checkpoint:
        # Files of one family may have it or not.
        stored = {name.removeprefix("model.").replace(".vision_model.", ".") for name in checkpoint.names()}
    assert recorder.names
    assert not {f"{name}.weight" for name in recorder.names} - stored


@pytest.mark.parametrize(
    "num_sizes", [len(IMAGES_BY_MODE), pytest.param(300, marks=pytest.mark.slow)], ids=["few", "300 sizes"]
)
def test_pixels_of_every_mode_are_those_of_the_reference(family, reference, num_sizes):
    if not family.has_image_processor:
        pytest.skip("transformers has no image processor of it that needs Pillow only")
    ours = read_processor(reference[1], Tokenizer.from_path(reference[1]))
    for i, size in enumerate(random_sizes(num_sizes, 1)):
        image = list(IMAGES_BY_MODE.values())[i % len(IMAGES_BY_MODE)](*size, i)
        # Pillow's and the processors' own way to RGB, which those have that say so.
        given = image if family.image_processor.do_convert_rgb else Image.fromarray(convert_to_rgb(image, True))
        check_pixels(family, ours, given, decode_image(open_image(image, "the image"), "the image"))


def test_a_family_sees_what_the_reference_sees(family, reference, llm):
    """Embeddings, the prompt's tokens with placeholders expanded, and 32 greedy ones with their log-probabilities."""
    model, count = reference[0], family.num_images
    images = [random_image(*size, seed=i) for i, size in enumerate(SIZES[:count])]
    prepared = family.prepared(images)
    inputs = family.model_inputs(prepared)
    encoder = llm.engine.runner.feature("inputs").encoder
    prompt = {"prompt": text_of([family.placeholder] * count), "multi_modal_data": {"image": images}}
    put = llm.images.put(llm._tokenize(prompt["prompt"], "the prompt"), images)
    with torch.no_grad():
        levels = family.features(model, inputs)
    of_images = [[rows.numpy().reshape(-1, rows.shape[-1]) for rows in level] for level in levels]
    expected = np.concatenate([np.concatenate(level) for level in of_images], axis=1)
    encoder.hold(put.inputs)
    ours = np.concatenate([encoder.rows(item, llm.engine.runner.programs) for item in put.inputs])
    encoder.let_go(put.inputs)
    assert np.abs(ours - expected).max() / np.abs(expected).max() < 1e-5

    [output] = llm.generate([prompt], GREEDY)
    expanded = text_of([family.replace(prepared, i) for i in range(count)])
    assert list(output.prompt_token_ids) == llm.tokenizer.encode(expanded)
    [completion] = output.outputs
    tokens = [*output.prompt_token_ids, *completion.token_ids]
    first = len(output.prompt_token_ids) - 1
    with torch.no_grad():
        logits = family.logits(model, torch.tensor([tokens]), inputs, family.types_of(tokens))[0, first:-1].double()
    assert logits.argmax(-1).tolist() == completion.token_ids
    best = logits.log_softmax(-1).max(-1).values.tolist()
    chosen = [at[token].logprob for token, at in zip(completion.token_ids, completion.logprobs, strict=True)]
    assert chosen == pytest.approx(best, rel=1e-4, abs=family.logprob_error)


@pytest.mark.sampled(3)
def test_an_answer_is_the_same_alone_among_others_and_from_the_cache(family, llm):
    """Bit for bit; and an image is encoded once, however often it comes."""

    def prompt_of(*images, text="Look: "):
        return {"prompt": text + family.placeholder * len(images), "multi_modal_data": {"image": [*images]}}

    first, second, third = (random_image(*size, seed=10 + i) for i, size in enumerate(SIZES))
    requests = [prompt_of(first, second), prompt_of(third), prompt_of(first, text="Another prompt: "), "No image here"]
    alone = []
    for request in requests:
        llm.engine.reset_prefix_cache()
        alone.append(bits(llm.generate([request], SHORT)[0]))
    encoder = llm.engine.runner.feature("inputs").encoder
    encoded = encoder.num_encoded
    llm.engine.reset_prefix_cache()
    assert list(map(bits, llm.generate(requests, SHORT, progress=False))) == alone
    [again] = llm.generate([requests[0]], SHORT)
    assert again.num_cached_tokens >= len(again.prompt_token_ids) - 16
    assert bits(again) == alone[0]
    assert encoder.num_encoded == encoded


@pytest.mark.slow
def test_verify_compares_what_a_family_sees(family, reference, llm):
    if not family.has_image_processor:
        pytest.skip("transformers has no image processor of it that needs Pillow only")
    folder = reference[1]
    config = json.loads((folder / "config.json").read_text())
    answer = ask_about_image(Reference.from_folder(folder), folder, config)
    check = check_images(llm, answer, GATES["float32"])
    assert check.passed
    assert check.embeddings_error < 1e-5


@pytest.mark.slow
def test_preempted_requests_answer_as_alone(family, reference):
    """Bit for bit, with prompts cut into chunks of every size."""
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True, logprobs=0)
    prompts = [
        {
            "prompt": "Before it. " * 5 + text_of([family.placeholder]),
            "multi_modal_data": {"image": random_image(20 + 7 * i, 30, seed=40 + i)},
        }
        for i in range(4)
    ]
    alone = None
    for num_tokens in (size for size in (96, 40, 23) if size >= family.seen_together + ENGINE["max_num_seqs"] - 1):
        sizes = ENGINE | {"max_num_batched_tokens": num_tokens, "max_model_len": 256}
        with LLM(str(reference[1]), kv_cache_memory=family.cache, show_progress=False, **sizes) as llm:
            if alone is None:
                alone = [bits(llm.generate([prompt], params)[0]) for prompt in prompts]
            llm.engine.reset_prefix_cache()
            assert list(map(bits, llm.generate(prompts, params, progress=False))) == alone
            assert llm.engine.num_preemptions > 0
