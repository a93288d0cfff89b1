"""Images in prompts of a tiny Mistral 3: what else is in the batch, caches, preemption, and what is refused."""

import dataclasses
import io
import itertools

import pytest
from PIL import Image

from jaxis import LLM, SamplingParams
from jaxis.cli.chat_commands import run_command
from jaxis.cli.chat_session import ChatSession
from jaxis.errors import RequestError
from jaxis.image_encoder import encoder as image_encoder
from jaxis.offline_requests import WantedRequest
from tests.support.leak_check import no_blocks_leaked
from tests.support.tiny_checkpoints import write_checkpoint
from tests.support.vision_checkpoints import random_image, write_mistral3

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


def bits(output):
    """Tokens, and log-probabilities bit for bit."""
    [completion] = output.outputs
    return completion.token_ids, [{i: each.logprob.hex() for i, each in at.items()} for at in completion.logprobs]


def encoder(llm):
    return llm.engine.runner.feature("inputs").encoder


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


def test_one_image_in_other_files_is_the_same_image(llm):
    """Its digest, its blocks in the cache, and the answer, bit for bit."""
    image, text, outputs, digests = random_image(40, 40, seed=25), "These are the tokens of several blocks: ", [], []
    exif = Image.Exif()
    exif[0x010E] = "Another text in another file"
    files = (("PNG", {}), ("PNG", {"compress_level": 1, "exif": exif}), ("WEBP", {"lossless": True}))
    encoded = encoder(llm).num_encoded
    for kind, options in files:
        data = io.BytesIO()
        image.save(data, kind, **options)
        prompt = prompt_of(data.getvalue(), text=text)
        digests.append([item.digest for item in llm._tokenize(prompt, "the prompt").inputs])
        outputs.append(llm.generate([prompt], SHORT)[0])
    assert digests[1:] == digests[:1] * 2
    assert list(map(bits, outputs[1:])) == [bits(outputs[0])] * 2
    assert all(output.num_cached_tokens >= len(output.prompt_token_ids) - 16 for output in outputs[1:])
    assert encoder(llm).num_encoded == encoded + 1


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


def test_a_chat_sends_images_with_the_next_message(llm, tmp_path, capsys):
    image, path, saved = random_image(30, 20, seed=51), tmp_path / "a b.png", tmp_path / "chat.json"
    image.save(path)
    params = dataclasses.replace(SHORT, logprobs=None)
    session = ChatSession(llm, params)
    run_command(session, f"/image '{path}'")  # as terminals paste it
    session.ask("What?")
    session.ask("And?")
    parts = [{"type": "image", "image": image}, {"type": "text", "text": "What?"}]
    messages = [{"role": "user", "content": parts}]
    for question in ("And?", None):
        [output] = llm.chat(messages, params)
        messages.append({"role": "assistant", "content": output.outputs[0].text})
        messages += [{"role": "user", "content": question}] if question else []
    answers = [message["content"] for message in messages[1::2]]
    assert capsys.readouterr().out.splitlines() == answers
    run_command(session, f"/save {saved}")
    run_command(session, "/undo")
    run_command(session, "/retry")
    assert [turn["content"] for turn in session.conversation.turns[1::2]] == answers[:1]
    run_command(session, "/undo")
    assert f"(taken back: [{path}] What?)" in capsys.readouterr().err
    run_command(session, f"/load {saved}")
    assert session.conversation.turns[0]["content"] == [{"type": "image", "image": str(path)}, parts[1]]
    assert [turn["content"] for turn in session.conversation.turns[1::2]] == answers
    with pytest.raises(RequestError, match="is not an image that can be read"):
        run_command(session, f"/image {saved}")
    assert not session.images


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
    plain = {"model": str(write_checkpoint(tmp_path))}
    blind = {"model": str(reference[1]), "limit_mm_per_prompt": {"image": 0}}
    for arguments, words in ((plain, "this model does not support image"), (blind, "limit_mm_per_prompt allows no")):
        with LLM(**arguments, kv_cache_memory="1MiB", show_progress=False) as llm:
            with pytest.raises(RequestError, match=words):
                llm.generate([prompt_of(random_image(8, 8))], SHORT)
            image = {"type": "image", "image": random_image(8, 8)}
            with pytest.raises(RequestError, match=words):
                llm.chat([{"role": "user", "content": [image]}], SHORT)


def test_answers_go_on_between_the_slices_of_an_image(llm, monkeypatch):
    """A slice a step; and what the slices compute is what the tower computes at once, bit for bit."""
    image, running = random_image(64, 64, seed=60), "A prompt of text alone"
    long = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, logprobs=0)
    llm.engine.reset_prefix_cache()
    alone = [
        bits(llm.generate([request], params)[0]) for request, params in ((running, long), (prompt_of(image), SHORT))
    ]
    monkeypatch.setattr(image_encoder, "_CPU_SLICE_FLOPS", 3e5)
    encoder(llm)._programs.clear()
    encoder(llm)._unused.clear()
    llm.engine.reset_prefix_cache()
    queued = []
    llm.requests.add(queued, [WantedRequest(llm._tokenize(running, "the prompt"), long)])
    while not queued[0].completions[0].sequence.output_token_ids:
        llm.requests.step()
    with_image = []
    llm.requests.add(with_image, [WantedRequest(llm._tokenize(prompt_of(image), "the prompt"), SHORT)])
    queued += with_image
    dispatched = []
    while not queued[1].finished:
        llm.requests.step()
        if (begun := encoder(llm)._begun) is not None:
            dispatched.append((begun.num_slices, len(queued[0].completions[0].sequence.output_token_ids)))
    while not queued[0].finished:
        llm.requests.step()
    assert dispatched[-1][0] > 5
    # A step may dispatch the one after it, too.
    assert all(later - earlier <= 2 for (earlier, _), (later, _) in itertools.pairwise(dispatched))
    assert dispatched[-1][1] - dispatched[0][1] >= len(dispatched) // 2
    assert [bits(request.output()) for request in queued] == alone
    encoder(llm)._programs.clear()
