"""Videos of LLaVA-OneVision, as frames, against transformers."""

import dataclasses

import numpy as np
import pytest
import torch
from transformers.models.llava_onevision.processing_llava_onevision import LlavaOnevisionProcessor

from jaxis import LLM, SamplingParams
from jaxis.vision.video import Video
from tests.support.vision_checkpoints import random_image
from tests.support.vision_families import FAMILIES

ENGINE = {"max_num_batched_tokens": 96, "max_num_seqs": 4, "block_size": 16, "max_model_len": 768}
GREEDY = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True, logprobs=0)
TEXT = "Look: <video> and <image>?"


@pytest.fixture(scope="module")
def family():
    [family] = [each for each in FAMILIES if each.name == "LLaVA-OneVision"]

    def change(made, token_id):
        made.video_token_index = made.video_token_id = token_id("<video>")

    return dataclasses.replace(family, change=change, special=("<image>", "<video>"))


@pytest.fixture(scope="module")
def reference(family, tmp_path_factory):
    folder = tmp_path_factory.mktemp("onevision")
    return family.write(folder), folder


def test_a_video_is_seen_as_the_reference_sees_it(family, reference):
    """Beside an image: tokens, embeddings, and 32 greedy tokens with their log-probabilities."""
    model, folder = reference
    frames, image = [random_image(50, 31, seed=i) for i in range(3)], random_image(40, 20, seed=9)
    side = family.image_processor.size["height"]
    mean, std = (np.asarray(each) for each in (family.image_processor.image_mean, family.image_processor.image_std))
    pixels = np.stack([np.asarray(frame.resize((side, side), resample=3)) for frame in frames])
    pixels = torch.tensor(((pixels / 255 - mean) / std).transpose(0, 3, 1, 2)[None], dtype=torch.float32)
    with torch.no_grad():
        [wanted] = model.model.get_video_features(pixels).pooler_output.numpy()
    processor = object.__new__(LlavaOnevisionProcessor)
    num_tokens = (model.config.vision_config.image_size // model.config.vision_config.patch_size) ** 2
    vars(processor).update(num_image_tokens=num_tokens, video_token="<video>")
    written = processor.replace_video_token({"pixel_values_videos": pixels}, 0)
    of_image = family.prepared([image])

    with LLM(str(folder), kv_cache_memory="4MiB", show_progress=False, **ENGINE) as llm:
        put = llm.images.put(llm._tokenize(TEXT, "the prompt"), [Video.of(frames, 2, "the video"), image])
        expanded = TEXT.replace("<video>", written).replace("<image>", family.replace(of_image, 0))
        assert list(put.token_ids) == llm.tokenizer.encode(expanded)
        *videos, _ = put.inputs
        encoder = llm.engine.runner.feature("inputs").encoder
        encoder.hold(videos)
        ours = np.concatenate([encoder.rows(item, llm.engine.runner.programs) for item in videos])
        encoder.let_go(videos)
        assert np.abs(ours - wanted).max() / np.abs(wanted).max() < 1e-5
        [output] = llm.generate([{"prompt": TEXT, "multi_modal_data": {"video": frames, "image": image}}], GREEDY)
        [completion] = output.outputs
        tokens = [*output.prompt_token_ids, *completion.token_ids]
    first = len(output.prompt_token_ids) - 1
    inputs = family.model_inputs(of_image) | {"pixel_values_videos": pixels}
    with torch.no_grad():
        logits = model(torch.tensor([tokens]), **inputs).logits[0, first:-1].double()
    assert logits.argmax(-1).tolist() == completion.token_ids
    best = logits.log_softmax(-1).max(-1).values.tolist()
    chosen = [at[token].logprob for token, at in zip(completion.token_ids, completion.logprobs, strict=True)]
    assert chosen == pytest.approx(best, rel=1e-4)
