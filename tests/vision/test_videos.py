"""Videos of Qwen-VL (2, 2.5, 3 and 3.5) and LFM3-VL, as frames, against transformers; and what is refused."""

import base64
import dataclasses
import io
import json

import httpx
import numpy as np
import pytest
import torch
from transformers.image_utils import SizeDict
from transformers.models.qwen2_5_vl.processing_qwen2_5_vl import Qwen2_5_VLProcessor
from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor
from transformers.video_utils import VideoMetadata

from jaxis import LLM, SamplingParams
from jaxis.engine.arguments import EngineArgs
from jaxis.engine.setup import build_engine
from jaxis.errors import ConfigError, RequestError
from jaxis.host.progress import ProgressDisplay
from jaxis.tokenizer import Tokenizer
from jaxis.vision.processors import read_processor
from jaxis.vision.video import MAX_FRAMES, Video, videos_of_prompt
from tests.server.conftest import serving
from tests.support.vision_checkpoints import MERGE, PATCH, random_image, token_id, video_processing, write_mistral3
from tests.support.vision_families import FAMILIES

ENGINE = {"max_num_batched_tokens": 96, "max_num_seqs": 4, "block_size": 16, "max_model_len": 1024}
GREEDY = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True, logprobs=0)
SHORT = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, logprobs=0)
VIDEO_SIZE = {"shortest_edge": 8 * 8 * 4, "longest_edge": 8 * 8 * 40}
PLACEHOLDER = "<|vision_start|><|video_pad|><|vision_end|>"
IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"
TEMPLATE = (
    "{% for message in messages %}[INST]{% for part in message.content %}{% if part.type == 'video' %}" + PLACEHOLDER
    + "{% elif part.type == 'image' %}" + IMAGE + "{% else %}{{ part.text }}{% endif %}{% endfor %}[/INST]{% endfor %}"
)  # fmt: skip
SPECIAL = ("<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>")
NAMES = ("Qwen2-VL", "Qwen2.5-VL", "Qwen3-VL", "Qwen3.5", "LFM3-VL")


def with_video(family):
    """The family with the tokens of videos."""

    def change(made, token_id):
        made.video_token_id = token_id("<|video_pad|>")
        made.vision_start_token_id, made.vision_end_token_id = map(token_id, SPECIAL[2:])
        if family.name == "Qwen2.5-VL":
            made.vision_config.tokens_per_second = 2

    return dataclasses.replace(family, change=change, special=SPECIAL)


def write_settings(folder, name):
    video = {"size": VIDEO_SIZE, "patch_size": PATCH, "merge_size": MERGE, "temporal_patch_size": 2}
    (folder / "video_preprocessor_config.json").write_text(json.dumps(video))
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": TEMPLATE}))
    if name == "Qwen3-VL":  # as it is published: what names the processor is config.json alone
        (folder / "processor_config.json").unlink()
        path = folder / "preprocessor_config.json"
        path.write_text(
            json.dumps(json.loads(path.read_text()) | {"image_processor_type": "Qwen2VLImageProcessorFast"})
        )


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(with_video(each), id=each.name, marks=[pytest.mark.slow] * (each.name not in NAMES[1:3]))
        for each in FAMILIES
        if each.name in NAMES
    ],
)
def family(request):
    return request.param


@pytest.fixture(scope="module")
def reference(family, tmp_path_factory):
    folder = tmp_path_factory.mktemp("video")
    model = family.write(folder)
    write_settings(folder, family.name)
    return model, folder


@pytest.fixture(scope="module")
def llm(reference):
    with LLM(str(reference[1]), kv_cache_memory="4MiB", show_progress=False, **ENGINE) as llm:
        yield llm


def frames_of(count, size=(40, 26), seed=0):
    return [random_image(*size, seed=seed + i) for i in range(count)]


def bits(output):
    [completion] = output.outputs
    return completion.token_ids, [{i: each.logprob.hex() for i, each in at.items()} for at in completion.logprobs]


def writes_times(family):
    return family.name.startswith(("Qwen3", "LFM3"))


def size_of(family, count, width, height):
    """The height and width that the reference resizes so many frames to."""
    module = video_processing("qwen3_vl" if writes_times(family) else "qwen2_vl")
    bounds = {"factor": PATCH * MERGE, "min_pixels": VIDEO_SIZE["shortest_edge"]}
    bounds["max_pixels"] = VIDEO_SIZE["longest_edge"]
    if writes_times(family):
        return module.smart_resize(num_frames=count, height=height, width=width, temporal_factor=2, **bounds)
    return module.smart_resize(height, width, **bounds)


def prepared(family, frames):
    """What the reference's processor makes of a video: patches, and its grid; Pillow resizes in torchvision's place."""
    height, width = size_of(family, len(frames), *frames[0].size)
    processor = family.image_processor
    resize = super(type(processor), processor).resize
    size, arrays = SizeDict(height=height, width=width), [np.asarray(frame).transpose(2, 0, 1) for frame in frames]
    resized = [resize(each, size, resample=3) for each in arrays]
    mean, std = (np.asarray(each)[:, None, None] for each in (processor.image_mean, processor.image_std))
    scaled = torch.tensor(np.stack([(each / 255 - mean) / std for each in resized]), dtype=torch.float32)
    module = video_processing("qwen2_vl")
    patches, *grid = module.Qwen2VLVideoProcessor.patchify(None, scaled[None], PATCH, MERGE, 2)
    return patches[0], grid


def expanded(family, grid, count, fps):
    """What the reference's processor puts in the place of a video."""
    inputs = {"video_grid_thw": np.asarray([grid])}
    settings = type("Settings", (), {"merge_size": MERGE, "temporal_patch_size": 2})
    kind = Qwen3VLProcessor if writes_times(family) else Qwen2_5_VLProcessor
    processor = object.__new__(kind)
    vars(processor).update(video_processor=settings, video_token="<|video_pad|>")
    vars(processor).update(vision_start_token="<|vision_start|>", vision_end_token="<|vision_end|>")
    metadata = VideoMetadata(total_num_frames=count, fps=fps, frames_indices=list(range(count)))
    text = processor.replace_video_token(inputs | {"video_metadata": [metadata]}, 0)
    # Around Qwen3-VL's, the template's tokens fell away until transformers 5, and do so in vLLM.
    return text if writes_times(family) else f"<|vision_start|>{text}<|vision_end|>"


def positions_as_published(types, grids, interval):
    """RoPE's positions [3, 1, T] by the rule with which the models were published: text goes on after the largest.

    Since version 5, transformers lets it go on after the rows and columns, which a longer video's time has passed
    (huggingface/transformers#45381).
    """
    positions, at, following = [], 0, 0
    grids = list(grids)
    while at < len(types):
        if types[at] == 0:
            positions.append([following] * 3)
            at, following = at + 1, following + 1
            continue
        times, rows, columns = grids.pop(0)
        step = interval if types[at] == 2 else 1
        inside = [
            [following + int(time * step), following + row, following + column]
            for time in range(times)
            for row in range(rows)
            for column in range(columns)
        ]
        positions += inside
        at, following = at + len(inside), max(map(max, inside)) + 1
    return torch.tensor(positions).T[:, None]


@pytest.mark.sampled
@pytest.mark.parametrize(("count", "fps"), [(3, 2.0), (12, 0.5), (7, 1.7)], ids=["short", "long", "uneven"])
def test_a_video_is_seen_as_the_reference_sees_it(family, reference, llm, count, fps):
    """Beside an image: its pixels, tokens, embeddings, and 32 greedy tokens with their log-probabilities."""
    model = reference[0]
    frames, image = frames_of(count, seed=50), random_image(30, 20, seed=90)
    patches, grid = prepared(family, frames)
    of_image = family.prepared([image])
    text = f"Look: {PLACEHOLDER} and {IMAGE}?"
    data = {"video": [(frames, {"fps": fps, "frames_indices": [*range(count)]})], "image": image}
    prompt = {"prompt": text, "multi_modal_data": data}
    put = llm.images.put(llm._tokenize(text, "the prompt"), [image, Video.of(frames, fps, "the video")])
    assert put == llm._tokenize(prompt, "the prompt")
    written = expanded(family, grid, count, fps)
    text = text.replace(PLACEHOLDER, written).replace("<|image_pad|>", family.replace(of_image, 0))
    assert list(put.token_ids) == llm.tokenizer.encode(text)

    with torch.no_grad():
        features = model.model.get_video_features(patches, torch.tensor([grid]))
    levels = [features.pooler_output, *(getattr(features, "deepstack_features", None) or [])]
    wanted = np.concatenate([np.concatenate([each.numpy() for each in level]) for level in levels], axis=1)
    videos, encoder = [item for item in put.inputs if item.shape[3] == 6], llm.engine.runner.feature("inputs").encoder
    encoder.hold(videos)
    ours = np.concatenate([encoder.rows(item, llm.engine.runner.programs) for item in videos])
    encoder.let_go(videos)
    assert np.abs(ours - wanted).max() / np.abs(wanted).max() < 1e-5

    [output] = llm.generate([prompt], GREEDY)
    [completion] = output.outputs
    tokens = [*output.prompt_token_ids, *completion.token_ids]
    first = len(output.prompt_token_ids) - 1
    pads = {token_id(each, family.all_special): kind for each, kind in zip(SPECIAL[:2], (1, 2), strict=True)}
    types = [pads.get(token, 0) for token in tokens]
    inputs = family.model_inputs(of_image)
    inputs |= {"pixel_values_videos": patches, "video_grid_thw": torch.tensor([grid])}
    inputs |= {} if family.types is None else {"mm_token_type_ids": torch.tensor([types])}
    if family.name == "Qwen2.5-VL":
        inputs["second_per_grid_ts"] = torch.tensor([2 / fps])
    merged = [grid[0], grid[1] // MERGE, grid[2] // MERGE]
    interval = 2 * 2 / fps if family.name == "Qwen2.5-VL" else 1
    if not writes_times(family) and (merged[0] - 1) * interval >= max(merged[1:]):
        image_grid = [1, *(side // MERGE for side in of_image["image_grid_thw"][0][1:])]
        inputs["position_ids"] = positions_as_published(types, [merged, image_grid], interval)
    with torch.no_grad():
        logits = model(torch.tensor([tokens]), **inputs).logits[0, first:-1].double()
    assert logits.argmax(-1).tolist() == completion.token_ids
    best = logits.log_softmax(-1).max(-1).values.tolist()
    chosen = [at[token].logprob for token, at in zip(completion.token_ids, completion.logprobs, strict=True)]
    assert chosen == pytest.approx(best, rel=1e-4)


def test_sizes_are_those_of_the_reference(family, reference):
    ours = read_processor(reference[1], Tokenizer.from_path(reference[1])).video
    rng = np.random.default_rng(0)
    for _ in range(60):
        count, size = int(rng.integers(2, 20)), tuple(int(2 ** rng.uniform(2, 9)) for _ in range(2))
        assert ours.target_size(count, *size)[::-1] == size_of(family, count, *size), (count, size)


@pytest.mark.sampled
def test_a_video_answers_alike_alone_among_others_and_from_the_cache(family, llm):
    """Bit for bit; the same frames at other times are another video, where a model sees them."""

    def prompt_of(frames, fps=2.0, text="What? "):
        video = (frames, {"fps": fps, "frames_indices": [*range(len(frames))]})
        return {"prompt": text + PLACEHOLDER, "multi_modal_data": {"video": video}}

    requests = [prompt_of(frames_of(6)), prompt_of(frames_of(6), 0.5), prompt_of(frames_of(4, seed=9)), "None here"]
    alone = []
    for request in requests:
        llm.engine.reset_prefix_cache()
        alone.append(bits(llm.generate([request], SHORT)[0]))
    assert (alone[0] == alone[1]) == (family.name == "Qwen2-VL")
    llm.engine.reset_prefix_cache()
    assert list(map(bits, llm.generate(requests, SHORT, progress=False))) == alone
    encoded = llm.engine.runner.feature("inputs").encoder.num_encoded
    [again] = llm.generate([requests[0]], SHORT)
    assert again.num_cached_tokens >= len(again.prompt_token_ids) - 16
    assert bits(again) == alone[0]
    assert llm.engine.runner.feature("inputs").encoder.num_encoded == encoded


def test_conversations_have_videos_in_the_forms_of_clients(llm):
    frames, files = frames_of(4), []
    for frame in frames:
        data = io.BytesIO()
        frame.save(data, "JPEG")
        files.append(data.getvalue())
    in_base64 = [base64.b64encode(each).decode() for each in files]
    urls = [f"data:image/jpeg;base64,{each}" for each in in_base64]
    parts = [
        {"type": "video", "video": files},
        {"type": "video", "video": urls, "fps": 2},
        {"type": "video_url", "video_url": {"url": "data:video/jpeg;base64," + ",".join(in_base64)}},
    ]
    chats = [[{"role": "user", "content": [part, {"type": "text", "text": "What?"}]}] for part in parts]
    outputs = llm.chat(chats, SHORT, progress=False)
    assert len({str(bits(output)) for output in outputs}) == 1
    array = np.stack([np.asarray(frame) for frame in frames])
    of_array, of_frames = (
        llm.generate({"prompt": PLACEHOLDER, "multi_modal_data": {"video": each}}, SHORT)[0] for each in (array, frames)
    )
    assert bits(of_array) == bits(of_frames)


def test_chat_completions_take_videos(family, reference, llm):
    if family.name != "Qwen3-VL":
        pytest.skip("one family shows it")
    frames, urls = frames_of(4), []
    for frame in frames:
        data = io.BytesIO()
        frame.save(data, "PNG")
        urls.append("data:image/png;base64," + base64.b64encode(data.getvalue()).decode())
    expected = llm.chat([{"role": "user", "content": [{"type": "video", "video": frames, "fps": 4}]}], SHORT)[0]
    built = build_engine(EngineArgs(str(reference[1]), kv_cache_memory="4MiB", **ENGINE), ProgressDisplay(False))
    with serving(built) as server, httpx.Client(base_url=server.url, timeout=60) as client:

        def post(part):
            message = {"role": "user", "content": [part]}
            request = {"messages": [message], "max_tokens": 4, "temperature": 0, "ignore_eos": True}
            return client.post("/v1/chat/completions", json=request)

        assert client.get("/v1/models").json()["data"][0]["input_modalities"] == ["text", "image", "video"]
        answer = post({"type": "video", "video": urls, "fps": 4}).json()
        assert answer["choices"][0]["message"]["content"] == expected.outputs[0].text
        assert answer["usage"]["prompt_tokens"] == len(expected.prompt_token_ids)
        refused = {
            "data: URL of an image for each frame": {"type": "video", "video": ["https://example.com/a.png"]},
            "a file or an address of a video": {"type": "video_url", "video_url": {"url": "https://example.com/a.mp4"}},
            "expected a number above 0": {"type": "video", "video": urls, "fps": -1},
        }
        for words, part in refused.items():
            response = post(part)
            assert response.status_code == 400
            assert words in response.json()["error"]["message"]
    built.engine.close()


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ({"video": "https://example.com/a.mp4"}, "is a file or an address of a video"),
        ({"video_url": {"url": "data:video/mp4;base64,AAAA"}}, "is a file or an address of a video"),
        ({"video": []}, "expected a list of images"),
        ({"video": frames_of(1) * (MAX_FRAMES + 1)}, f"more than {MAX_FRAMES} frames"),
        ({"video": [*frames_of(2), *frames_of(1, (26, 40))]}, "frame 3 of the video has 26 x 40 pixels, and the first"),
        ({"video": [*frames_of(1), b"GIF89a"]}, "frame 2 of the video is not an image"),
        ({"video": frames_of(1, (2000, 2000)) * 150}, "more than 512000000 pixels"),
        ({"video": frames_of(2), "fps": 0}, "has fps=0; expected a number above 0"),
        ({"video": frames_of(300)}, "at least"),
    ],
    ids=range(9),
)
def test_what_cannot_be_taken_is_refused(llm, part, message):
    part = {"type": next(iter(part)), **part}
    with pytest.raises(RequestError) as error:
        llm.chat([{"role": "user", "content": [part]}], SHORT)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_images_and_videos_are_counted_apart(family, reference):
    """As vLLM counts them: what is not named has its default."""
    if family.name != "Qwen3-VL":
        pytest.skip("one family shows it")
    image, video = {"type": "image", "image": frames_of(1)[0]}, {"type": "video", "video": frames_of(2)}
    refused = {
        (1, 2): {"2 images, and at most 1": [image, image], "3 videos, and at most 2": [video] * 3, "": [video, image]},
        (None, 0): {"1 videos, and at most 0": [image, video], "": [image, image]},
        (0, 0): {"^limit_mm_per_prompt allows no images": [image], "limit_mm_per_prompt allows": [video]},
    }
    for most, contents in refused.items():
        limits = {kind: each for kind, each in zip(("image", "video"), most, strict=True) if each is not None}
        arguments = ENGINE | {"kv_cache_memory": "1MiB", "show_progress": False, "limit_mm_per_prompt": limits}
        with LLM(str(reference[1]), **arguments) as llm:
            for message, content in contents.items():
                if message:
                    with pytest.raises(RequestError, match=message):
                        llm.chat([{"role": "user", "content": content}], SHORT)
                else:
                    assert llm.chat([{"role": "user", "content": content}], SHORT)


@pytest.mark.parametrize("limits", [{"audio": 1}, {"image": -1}, {"video": "1"}, {"video": True}, ["image"]])
def test_limits_that_are_none_are_named(limits):
    with pytest.raises(ConfigError, match=r"limit_mm_per_prompt=.* must be the most images and videos of a prompt"):
        EngineArgs("model", limit_mm_per_prompt=limits)


def test_other_models_refuse_videos(tmp_path):
    write_mistral3(tmp_path)
    only_images = "this model does not support video input: send images and text"
    for limits, message in (({"image": 1}, only_images), ({"image": 0}, "limit_mm_per_prompt allows no images")):
        with LLM(
            str(tmp_path), kv_cache_memory="1MiB", show_progress=False, max_model_len=64, limit_mm_per_prompt=limits
        ) as llm:
            part = {"type": "video", "video": frames_of(2)}
            with pytest.raises(RequestError, match=message):
                llm.chat([{"role": "user", "content": [part]}], SHORT)
            with pytest.raises(RequestError, match=message):
                llm.generate({"prompt": "a", "multi_modal_data": {"video": frames_of(2)}}, SHORT)


def test_metadata_that_is_none_is_refused():
    frames = np.zeros((2, 8, 8, 3), np.uint8)
    for metadata, message in (
        ({"fps": 0}, "fps=0"),
        ({"fps": 2, "frames_indices": [0, "one"]}, "frames_indices that are no integers"),
        ({"fps": 2, "frames_indices": [1, 0]}, "frames_indices for each of its 2 frames, ascending"),
        ({"fps": 2, "frames_indices": [0, 1], "total_num_frames": 0}, "total_num_frames=0"),
    ):
        with pytest.raises(RequestError, match=message):
            videos_of_prompt([(frames, metadata)], "prompt")
