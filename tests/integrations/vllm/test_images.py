"""Images in prompts inside vLLM: answers are those of jaxis.LLM with the same images, bit for bit."""

import base64
import dataclasses
import io
import os
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image
from safetensors.numpy import load_file, save_file

os.environ |= {"VLLM_PLUGINS": "jaxis", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
pytest.importorskip("vllm")
pytest.importorskip("peft")

import openai
import peft
import torch
import transformers
import vllm
from vllm.engine.arg_utils import EngineArgs
from vllm.exceptions import VLLMValidationError
from vllm.lora.request import LoRARequest
from vllm.multimodal import MULTIMODAL_REGISTRY
from vllm.multimodal.inputs import MultiModalFeatureSpec, MultiModalKwargsItem
from vllm.v1.core.sched.output import SchedulerOutput

import jaxis
from jaxis.engine.opened_model import EMBEDDED_MODEL
from jaxis.errors import EngineError, RequestError
from jaxis.integrations.vllm.config_checks import check_request
from jaxis.integrations.vllm.encoder_cache import EncoderCache
from jaxis.integrations.vllm.model_shims import may_take_images
from jaxis.models.registry import built_in_models
from tests.integrations.vllm.test_llm import check, make_vllm, metric, set_contract
from tests.integrations.vllm.vision_folders import facts_of, write_vision_folders
from tests.integrations.vllm.vllm_requests import Case, answer, jaxis_answers, random_cases
from tests.integrations.vllm.vllm_server import vllm_server
from tests.support.adapters import randomize
from tests.support.vision_checkpoints import random_image, token_id, write_mistral3

SIZES = ((40, 64), (64, 64), (30, 100), (9, 57), (64, 24), (20, 20))
GREEDY = {"temperature": 0.0, "max_tokens": 12, "ignore_eos": True, "logprobs": 1}
FAMILIES = (
    *("Mistral 3", "LightOnOCR", "Idefics3", "SmolVLM", "InternVL", "Gemma 3", "Gemma 4", "Gemma 4 12B", "Qwen2-VL"),
    *("Gemma 4 without what sees later tokens", "Qwen2.5-VL", "Qwen3-VL", "Qwen3-VL MoE", "Qwen3.5", "Qwen3.5 MoE"),
    *("GLM-4.1V", "GLM-4.5V", "GLM-OCR", "LLaVA 1.5", "LLaVA-NeXT", "LLaVA with SigLIP", "Pixtral 12B", "Llama 4"),
    *("LFM2-VL", "LLaVA-OneVision", "LLaVA-OneVision, one image", "Kimi K2.5"),
)
IMAGE = token_id("[IMG]")


def images_of(seed, sizes=SIZES):
    return [random_image(*size, seed=seed + i) for i, size in enumerate(sizes)]


@pytest.fixture(scope="module")
def mistral3(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mistral3")
    write_mistral3(folder)
    return folder


@pytest.fixture(scope="module")
def reference(mistral3):
    sizes = {"max_num_seqs": 8, "max_model_len": 256, "max_num_batched_tokens": 64}
    return jaxis.LLM(mistral3, dtype="float32", seed=3, **sizes, kv_cache_memory="16MiB", show_progress=False)


def cases_with_images(number, seed):
    """Requests with random parameters; of three, two have images, which others have, too."""
    random, pool = np.random.default_rng(seed), images_of(100)
    cases = [case for case in random_cases(number, seed, longest=40, vocab_size=250) if not case.has_grammar]
    for case in cases:
        # Words of vLLM's spelling, tokens that this model lacks, and what vLLM holds back with `ignore_eos`, too.
        for name in ("bad_words", "stop_token_ids", "min_tokens"):
            case.values.pop(name, None)
        case.values["ignore_eos"] = True  # of the tokenizer, whose end this model's configuration does not name
        for _ in range(random.integers(3)):
            case.prompt = list(case.prompt)
            case.prompt.insert(random.integers(len(case.prompt) + 1), IMAGE)
            case.images.append(pool[random.integers(len(pool))])
    return cases


def encoder_of(llm):
    worker = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker
    feature = worker._runner.runner.feature("inputs")
    return None if feature is None else feature.encoder


@pytest.mark.parametrize(
    "arguments",
    [{}, {"async_scheduling": False, "max_num_batched_tokens": 16}, {"enable_prefix_caching": False}],
)
def test_requests_with_images_get_the_same_tokens_and_log_probabilities(mistral3, reference, arguments):
    """In chunks that end within images, and with images that several requests have."""
    llm = make_vllm(mistral3, **arguments)
    cases = cases_with_images(60, seed=1)
    check(llm, reference, cases)
    assert encoder_of(llm).num_encoded <= len(SIZES)
    assert (metric(llm, "vllm:prefix_cache_hits") > 0) == arguments.get("enable_prefix_caching", True)


@pytest.mark.parametrize("contract", ["V1", "V2"])
def test_preempted_requests_do_too(mistral3, reference, contract):
    llm = make_vllm(mistral3, num_gpu_blocks_override=24)
    set_contract(llm, contract)
    cases = [
        Case([7, IMAGE, 8 + i, 9], images=[image], temperature=0.0, max_tokens=90, ignore_eos=True, logprobs=1)
        for image in images_of(200)
        for i in range(2)
    ]
    check(llm, reference, cases)
    assert metric(llm, "vllm:num_preemptions") > 0


def test_vllms_cache_of_images_says_what_is_kept(mistral3, reference):
    """A cache of fewer tokens than the images have; the worker keeps what it keeps, and the encoder some beside."""
    llm = make_vllm(mistral3, max_num_batched_tokens=80, max_num_seqs=2)
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    assert scheduler.encoder_cache_manager.cache_size < 6 * 64
    cases = [
        Case([7, IMAGE, IMAGE, 9], images=[one, other], **GREEDY) for one in images_of(1) for other in images_of(2)
    ]
    check(llm, reference, cases)
    held = encoder_of(llm)._held
    assert sum(map(len, held.values())) <= scheduler.encoder_cache_manager.cache_size
    llm.llm_engine.reset_encoder_cache()
    assert not held


def test_the_next_turn_finds_the_blocks_of_its_image_and_another_image_none(mistral3, reference):
    llm = make_vllm(mistral3)
    first, other = (random_image(40, 40, seed=20 + i) for i in range(2))
    text = list(b"These are the tokens of several blocks: ")

    def ask(image, more=()):
        case = Case([*text, IMAGE, *more], images=[image], **GREEDY)
        [output] = llm.generate([case.vllm_prompt], [case.vllm_params], use_tqdm=False)
        return output

    length = len(ask(first).prompt_token_ids)
    turn, another = ask(first, range(40, 70)), ask(other)
    assert (turn.num_cached_tokens, another.num_cached_tokens) == (length // 16 * 16, len(text) // 16 * 16)
    assert encoder_of(llm).num_encoded == 2
    cases = [
        Case([*text, IMAGE, *range(40, 70)], images=[first], **GREEDY),
        Case([*text, IMAGE], images=[other], **GREEDY),
    ]
    assert list(map(answer, (turn, another))) == jaxis_answers(reference, cases)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A folder for each family's name."""
    root = tmp_path_factory.mktemp("families")
    write_vision_folders(root)
    return root


@pytest.mark.parametrize("name", FAMILIES)
def test_families_answer_as_in_jaxis(folders, name):
    folder = folders / name
    facts = facts_of(folder)
    sizes = {"max_num_seqs": 4, "max_model_len": 512, "max_num_batched_tokens": 512 if facts["seen_together"] else 64}
    images = images_of(300)
    text = f"Of {facts['placeholder']} and {facts['placeholder']}:"
    prompts = [
        {"prompt": f"What is {facts['placeholder']}?", "multi_modal_data": {"image": images[0]}},
        {"prompt": text, "multi_modal_data": {"image": images[1:3]}},
        {"prompt": "No image."},
        {"prompt": text, "multi_modal_data": {"image": images[3:5]}},
    ]
    with jaxis.LLM(folder, dtype="float32", **sizes, kv_cache_memory="16MiB", show_progress=False) as llm:
        wanted = llm.generate(prompts, jaxis.SamplingParams(**GREEDY))
    llm = vllm.LLM(str(folder), dtype="float32", **sizes, kv_cache_memory_bytes=16 << 20)
    found = llm.generate(prompts, vllm.SamplingParams(**GREEDY), use_tqdm=False)
    assert [list(each.prompt_token_ids) for each in found] == [list(each.prompt_token_ids) for each in wanted]
    assert list(map(answer, found)) == list(map(answer, wanted))


def test_images_whose_tokens_see_each_other_are_computed_whole(folders):
    """Images beside others, and where blocks of the same image are found that end within it."""
    sizes = {"max_num_seqs": 4, "max_model_len": 128, "max_num_batched_tokens": 144}
    pool = images_of(400)
    prompts = [
        {"prompt": f"{'b' * (k % 5)}<start_of_image>{'c' * k} and so on", "multi_modal_data": {"image": pool[k % 3]}}
        for k in range(24)
    ]
    folder = folders / "Gemma 3"
    with jaxis.LLM(folder, dtype="float32", **sizes, kv_cache_memory="16MiB", show_progress=False) as llm:
        wanted = llm.generate(prompts, jaxis.SamplingParams(**GREEDY))
    llm = make_vllm(folder, **sizes, num_gpu_blocks_override=64)
    found = llm.generate(prompts, vllm.SamplingParams(**GREEDY), use_tqdm=False)
    assert list(map(answer, found)) == list(map(answer, wanted))
    assert metric(llm, "vllm:prefix_cache_hits") > 0


def test_drafts_beside_images_change_nothing(mistral3, reference):
    speculative = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
    llm = make_vllm(mistral3, speculative_config=speculative)
    cases = [Case([*[7, 8] * 8, IMAGE, *[7, 8] * 8], images=[image], **GREEDY) for image in images_of(500)]
    check(llm, reference, cases)


def test_adapters_beside_images_are_those_of_jaxis(mistral3, tmp_path):
    """Under each adapter's name, vLLM keeps an image's blocks apart, and its embeddings."""
    folder = tmp_path / "adapter"
    layers = r".*language_model.*\.(q_proj|v_proj)"
    base = transformers.AutoModelForImageTextToText.from_pretrained(mistral3, dtype=torch.float32)
    adapted = peft.get_peft_model(base, peft.LoraConfig(target_modules=layers, r=4))
    randomize(adapted)
    adapted.save_pretrained(folder)
    cases = [Case([7, 8, IMAGE, 9, *range(40)], images=[image], **GREEDY) for image in images_of(600) for _ in range(2)]
    settings = {"max_num_seqs": 8, "max_model_len": 256, "max_num_batched_tokens": 64, "enable_lora": True}
    with jaxis.LLM(mistral3, dtype="float32", **settings, kv_cache_memory="16MiB", show_progress=False) as llm:
        wanted = llm.generate(
            [case.jaxis_prompt for case in cases],
            jaxis.SamplingParams(**GREEDY),
            lora_request=[jaxis.LoRARequest("a", 1, folder), None] * len(SIZES),
        )
    llm = make_vllm(mistral3, enable_lora=True, max_lora_rank=16)
    found = llm.generate(
        [case.vllm_prompt for case in cases],
        vllm.SamplingParams(**GREEDY),
        lora_request=[LoRARequest("a", 1, str(folder)), None] * len(SIZES),
        use_tqdm=False,
    )
    assert list(map(answer, found)) == list(map(answer, wanted))
    assert answer(found[0])[0] != answer(found[1])[0]


class Encoder:
    """Holds what it is told to."""

    def __init__(self):
        self.held = []

    def hold(self, images):
        self.held += images

    def let_go(self, images):
        for image in images:
            self.held.remove(image)


def test_pixels_that_vllm_leaves_out_are_those_that_came_before(mistral3):
    processor = MULTIMODAL_REGISTRY.create_processor(EngineArgs(str(mistral3)).create_model_config())
    sent = processor([7, IMAGE, 8], processor.info.parse_mm_data({"image": random_image(40, 40, seed=1)}))
    [item], [name], [place] = (sent[key]["image"] for key in ("mm_kwargs", "mm_hashes", "mm_placeholders"))
    whole = MultiModalFeatureSpec(item, "image", name, place, name)
    without = dataclasses.replace(whole, data=None)
    step = SchedulerOutput.make_empty()
    step.scheduled_encoder_inputs = {"a": [0]}
    cache = EncoderCache(Encoder())
    lost = cache.read([without])
    entry = SimpleNamespace(
        sequence=SimpleNamespace(seq_id="a"), start=0, num_tokens=9, spans=[image for _, image in lost]
    )
    cache.update(step, lambda _: lost)
    with pytest.raises(EngineError, match="within an image that the worker does not have any more"):
        cache.check([entry])
    read = cache.read([whole])
    assert cache.read([without]) == read
    assert lost[0][1].data == b""
    cache.update(step, lambda _: read)
    cache.check([entry])
    cache.clear()
    assert not cache._encoder.held


def test_every_model_with_a_tower_may_take_images():
    assert all(may_take_images(name) for name, model in built_in_models().items() if getattr(model, "tower", None))


@pytest.mark.parametrize(
    ("prompt", "line"),
    [
        ({"prompt": "[IMG]", "multi_modal_data": {"image": images_of(0)[:2]}}, "the prompt has 1 placeholders"),
        ({"prompt": "[IMG]" * 5, "multi_modal_data": {"image": images_of(0)[:5]}}, r"At most 4 image\(s\)"),
        ({"prompt": "[IMG]", "multi_modal_data": {"image": Image.new("RGB", (500, 2))}}, "one side is more than 200"),
        ({"prompt": "[IMG]", "multi_modal_data": {"image": images_of(0)[0]}, "mm_processor_kwargs": {"size": 3}},
         "mm_processor_kwargs is not supported"),
        ({"prompt": "[IMG]" * 4, "multi_modal_data": {"image": [random_image(64, 64, seed=1)] * 4}},
         "272 tokens|at least 2"),
    ],
)  # fmt: skip
def test_what_cannot_be_seen_is_refused_for_this_request(mistral3, refusing, prompt, line):
    with pytest.raises(VLLMValidationError, match=line):
        refusing.generate(prompt, vllm.SamplingParams(max_tokens=1), use_tqdm=False)


def test_what_clients_send_as_if_it_were_an_image_is_refused():
    prompt = {"type": "multimodal", "mm_kwargs": {"image": [MultiModalKwargsItem.dummy()]}}
    with pytest.raises(RequestError, match="are not made by jaxis' processor here: send the images themselves"):
        check_request(prompt, vllm.SamplingParams())


@pytest.fixture(scope="module")
def refusing(mistral3):
    return make_vllm(mistral3, limit_mm_per_prompt={"image": 4})


def test_without_images_the_text_runs_alone(mistral3, reference):
    llm = make_vllm(mistral3, limit_mm_per_prompt={"image": 0})
    assert encoder_of(llm) is None
    check(llm, reference, [Case([5, 6, 7], **GREEDY)])
    with pytest.raises(ValueError, match="text-only"):
        llm.generate({"prompt": "[IMG]", "multi_modal_data": {"image": images_of(0)[0]}}, use_tqdm=False)


def test_a_text_model_takes_no_images():
    llm = make_vllm(EMBEDDED_MODEL)
    with pytest.raises(ValueError, match="text-only"):
        llm.generate({"prompt": "a", "multi_modal_data": {"image": images_of(0)[0]}}, use_tqdm=False)


def test_a_checkpoint_without_a_tower_is_named(tmp_path, mistral3):
    for path in mistral3.iterdir():
        if path.name != "model.safetensors":
            (tmp_path / path.name).symlink_to(path)
    tensors = load_file(mistral3 / "model.safetensors")
    save_file({name: each for name, each in tensors.items() if "vision" not in name and "projector" not in name},
              tmp_path / "model.safetensors")  # fmt: skip
    with pytest.raises(ValueError, match="have no vision tower; for text alone, give limit_mm_per_prompt"):
        make_vllm(tmp_path)


def test_steps_that_are_too_short_for_images_that_see_themselves_are_named(folders):
    with pytest.raises(ValueError, match="max_num_batched_tokens=64 is less than max_model_len=256, and the tokens of"):
        make_vllm(folders / "Gemma 3")


def test_other_settings_of_media_are_named(mistral3):
    with pytest.raises(ValueError, match=r"mm_processor_kwargs=.* is not supported"):
        make_vllm(mistral3, mm_processor_kwargs={"longest_edge": 3})


def test_a_servers_conversations_have_images_of_files(mistral3, reference):
    """Turned as their files say, and on white where they are transparent."""
    turned, transparent, plain = io.BytesIO(), io.BytesIO(), io.BytesIO()
    exif = Image.Exif()
    exif[0x0112] = 6
    random_image(60, 30, seed=1).save(turned, "JPEG", exif=exif)
    random_image(40, 40, seed=2, mode="RGBA").save(transparent, "PNG")
    random_image(30, 50, seed=3).save(plain, "PNG")
    urls = [
        f"data:image/{kind};base64,{base64.b64encode(file.getvalue()).decode()}"
        for kind, file in (("jpeg", turned), ("png", transparent), ("png", plain))
    ]
    conversations = [
        [{"role": "user", "content": [*map(_image_part, urls[:count]), {"type": "text", "text": "What is this?"}]}]
        for count in range(4)
    ]
    wanted = reference.chat(conversations, jaxis.SamplingParams(temperature=0, max_tokens=12, ignore_eos=True))
    options = ("--max-num-seqs=8", "--max-model-len=256", "--max-num-batched-tokens=64", "--served-model-name=tiny")
    with vllm_server(mistral3, *options, "--generation-config=vllm") as (address, _):
        client = openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0)

        def ask(messages):
            extra = {"ignore_eos": True, "return_token_ids": True}
            answer = client.chat.completions.create(
                model="tiny", messages=messages, temperature=0, max_tokens=12, extra_body=extra
            )
            return answer.choices[0].token_ids, answer.usage.prompt_tokens

        with ThreadPoolExecutor(8) as pool:
            found = list(pool.map(ask, conversations * 2))
        assert found == [(each.outputs[0].token_ids, len(each.prompt_token_ids)) for each in wanted] * 2
        with pytest.raises(openai.BadRequestError, match=r"cannot identify image|is not an image"):
            ask([{"role": "user", "content": [_image_part("data:image/png;base64,AAAA")]}])


def _image_part(url):
    return {"type": "image_url", "image_url": {"url": url}}
