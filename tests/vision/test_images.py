"""Images in prompts of a tiny Mistral 3, against transformers; and what else is in the batch, caches, preemption."""

import io
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from jaxis import LLM, SamplingParams
from jaxis.errors import RequestError
from tests.support.leak_check import no_blocks_leaked
from tests.support.tiny_checkpoints import write_checkpoint
from tests.support.vision_checkpoints import (
    MERGE,
    PATCH,
    processor_class,
    random_image,
    reference_processor,
    write_mistral3,
)

SIZES = ((30, 20), (64, 64), (9, 57))
GREEDY = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True, logprobs=0)
ENGINE = {"max_num_batched_tokens": 48, "max_num_seqs": 4, "block_size": 16, "max_model_len": 512}
SHORT = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, logprobs=0)


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mistral3")
    return write_mistral3(folder), folder


@pytest.fixture(scope="module")
def llm(reference):
    with LLM(str(reference[1]), kv_cache_memory="2MiB", show_progress=False, **ENGINE) as llm:
        yield llm


def prompt_of(*images, text="What is it? ", **keys):
    return {"prompt": text + " and ".join(["[IMG]"] * len(images)), "multi_modal_data": {"image": [*images]}, **keys}


def pixels_of(images):
    """pixel_values and image_sizes, as transformers' processor makes them."""
    made = reference_processor()(list(images), patch_size=PATCH * MERGE, return_tensors="pt")
    return {
        "pixel_values": made["pixel_values"].float(),
        "image_sizes": torch.as_tensor(np.asarray(made["image_sizes"])),
    }


def bits(output):
    """Tokens, and log-probabilities bit for bit."""
    [completion] = output.outputs
    return completion.token_ids, [{i: each.logprob.hex() for i, each in at.items()} for at in completion.logprobs]


def encoder(llm):
    return llm.engine.runner.inputs


def expanded_by_the_reference(processor, inputs, num_images):
    """The text of each image."""
    settings = SimpleNamespace(
        **{"patch_size": PATCH, "spatial_merge_size": MERGE, "effective_patch_size": PATCH * MERGE},
        **{"image_token": "[IMG]", "image_break_token": "[IMG_BREAK]", "image_end_token": "[IMG_END]"},
    )
    return [processor.replace_image_token(settings, inputs, i) for i in range(num_images)]


def check_against(model, processor, llm):
    """Embeddings, the prompt's tokens with placeholders expanded, and 32 greedy ones after chunks that cut images."""
    images = [random_image(*size, seed=i) for i, size in enumerate(SIZES)]
    inputs = pixels_of(images)
    prompt = llm.images.put(llm._tokenize(prompt_of(*images)["prompt"], "the prompt"), images)
    with torch.no_grad():
        expected = model.model.get_image_features(**inputs).pooler_output
    for item, rows in zip(prompt.inputs, expected, strict=True):
        encoder(llm).hold([item])
        ours = encoder(llm).rows(item, llm.engine.runner.programs)
        encoder(llm).let_go([item])
        assert np.abs(ours - rows.numpy()).max() / np.abs(rows.numpy()).max() < 1e-5
    [output] = llm.generate([prompt_of(*images)], GREEDY)
    text = "What is it? " + " and ".join(expanded_by_the_reference(processor, inputs, len(images)))
    assert list(output.prompt_token_ids) == llm.tokenizer.encode(text)
    [completion] = output.outputs
    tokens = [*output.prompt_token_ids, *completion.token_ids]
    first = len(output.prompt_token_ids) - 1
    with torch.no_grad():
        logits = model(torch.tensor([tokens]), **inputs).logits[0, first:-1].double()
    assert logits.argmax(-1).tolist() == completion.token_ids
    best = logits.log_softmax(-1).max(-1).values.tolist()
    ours = [at[token].logprob for token, at in zip(completion.token_ids, completion.logprobs, strict=True)]
    assert ours == pytest.approx(best, rel=1e-4)


def test_mistral_3_sees_what_the_reference_sees(reference, llm):
    check_against(reference[0], processor_class("pixtral", "PixtralProcessor"), llm)


def test_an_answer_is_the_same_alone_among_others_and_from_the_cache(llm):
    """Bit for bit; and an image is encoded once, however often it comes."""
    first, second, third = (random_image(*size, seed=10 + i) for i, size in enumerate(SIZES))
    requests = [prompt_of(first, second), prompt_of(third), prompt_of(first, text="Another prompt: "), "No image here"]
    alone = []
    for request in requests:
        llm.engine.reset_prefix_cache()
        alone.append(bits(llm.generate([request], SHORT)[0]))
    encoded = encoder(llm).num_encoded
    llm.engine.reset_prefix_cache()
    assert list(map(bits, llm.generate(requests, SHORT, progress=False))) == alone
    [again] = llm.generate([requests[0]], SHORT)
    assert again.num_cached_tokens >= len(again.prompt_token_ids) - 16
    assert bits(again) == alone[0]
    assert encoder(llm).num_encoded == encoded


def test_prompts_with_other_images_share_no_blocks_after_them(llm):
    """Of images of one size, whose tokens are equal."""
    text = "These are the tokens of several blocks: "
    images = [random_image(40, 40, seed=20 + i) for i in range(2)]
    outputs = [llm.generate([prompt_of(image, text=text)], SHORT)[0] for image in images]
    assert outputs[0].prompt_token_ids == outputs[1].prompt_token_ids
    assert outputs[1].num_cached_tokens == len(text) // 16 * 16
    llm.engine.reset_prefix_cache()
    assert bits(llm.generate([prompt_of(images[1], text=text)], SHORT)[0]) == bits(outputs[1])
    # The same image with the same tokens before and after it, at another place of its block.
    [moved] = llm.generate([prompt_of(images[1], images[1], text=text)], SHORT)
    assert moved.num_cached_tokens == (len(text) + 30) // 16 * 16


def test_preempted_and_aborted_requests_leave_nothing(reference):
    images = [random_image(64, 64, seed=30 + i) for i in range(4)]
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True, logprobs=0)
    sizes = ENGINE | {"max_model_len": 160}
    with LLM(str(reference[1]), kv_cache_memory="168KiB", show_progress=False, **sizes) as llm:
        alone = [bits(llm.generate([prompt_of(image)], params)[0]) for image in images]
        llm.engine.reset_prefix_cache()
        together = llm.generate([prompt_of(image) for image in images], params, progress=False)
        assert llm.engine.num_preemptions > 0
        assert list(map(bits, together)) == alone
        with no_blocks_leaked(llm):
            llm.stream(prompt_of(random_image(64, 64, seed=40)), SHORT).close()  # queued, and never run
            stream = llm.stream(prompt_of(random_image(64, 64, seed=41)), params)
            next(stream)
            stream.close()
        assert encoder(llm).num_encoded == 5  # not of the one that never ran, and of none twice
        assert not encoder(llm)._held


def test_conversations_have_images_in_every_form(llm, tmp_path):
    image = random_image(30, 20, seed=50)
    path = tmp_path / "image.png"
    image.save(path)
    data = io.BytesIO()
    image.save(data, "PNG")
    parts = [
        {"type": "image", "image": image},
        {"type": "image", "image": path},
        {"type": "image", "image": data.getvalue()},
        {"type": "image_pil", "image_pil": image},
    ]
    chats = [[{"role": "user", "content": [part, {"type": "text", "text": "What?"}]}] for part in parts]
    outputs = llm.chat(chats, SHORT, progress=False)
    assert len({bits(output)[0] == bits(outputs[0])[0] for output in outputs}) == 1
    assert llm.tokenizer.decode(outputs[0].prompt_token_ids, skip_special_tokens=False).startswith(
        "<s>[INST][IMG][IMG]"
    )


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        (prompt_of() | {"multi_modal_data": {"image": ["https://example.com/a.png"]}}, "0 placeholders"),
        (prompt_of("https://example.com/a.png"), "nothing is fetched"),
        (prompt_of(random_image(8, 8), text="[IMG]"), "2 placeholders [IMG] for 1 images"),
        (prompt_of(*[random_image(8, 8)] * 33), "33 images, and at most 32"),
        (prompt_of(*[random_image(64, 64)] * 8), "at least 623 tokens"),
        (prompt_of(b"GIF89a"), "is not an image"),
        (prompt_of(3), "expected a PIL image"),
        ({"prompt": "[IMG]", "multi_modal_data": {"audio": 1}}, "multi_modal_data must be"),
    ],
)
def test_what_cannot_be_taken_is_refused(llm, prompt, message):
    with pytest.raises(RequestError, match=r"[^\n]*") as error:
        llm.generate([prompt], SHORT)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_a_model_without_eyes_refuses_images(tmp_path, reference):
    plain = write_checkpoint(tmp_path)
    blind = {"model": str(reference[1]), "limit_mm_per_prompt": {"image": 0}}
    for arguments in ({"model": str(plain)}, blind):
        with LLM(**arguments, kv_cache_memory="1MiB", show_progress=False) as llm:
            with pytest.raises(RequestError, match="this model does not support image input"):
                llm.generate([prompt_of(random_image(8, 8))], SHORT)
            image = {"type": "image", "image": random_image(8, 8)}
            with pytest.raises(RequestError, match="this model does not support image input"):
                llm.chat([{"role": "user", "content": [image]}], SHORT)
