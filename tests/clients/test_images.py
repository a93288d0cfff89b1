"""Claude Code reads an image file, and Codex sends one with its prompt: the model gets their pixels."""

import dataclasses
import json

import numpy as np
import pytest
from PIL import Image

from tests.clients import test_claude_code, test_codex
from tests.support.scripted_engine import ScriptedEngine, served
from tests.support.vision_checkpoints import random_image, reference_processor, write_processor

TEMPLATE = """
{%- for tool in tools or [] %}{{ tool | tojson }}{% endfor %}
{%- for message in messages %}[{{ message.role }}]
{%- if message.content is string %}{{ message.content }}{% else %}{% for part in message.content or [] %}
{%- if part.type == "image" %}[IMG]{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}
{%- for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}
{%- if message.tool_call_id %}(for {{ message.tool_call_id }}){% endif %}{% endfor %}[assistant]
"""


class SeeingEngine(ScriptedEngine):
    """Attributes: `inputs` are the images of the last request."""

    def __init__(self, folder):
        super().__init__(TEMPLATE, ("[IMG]", "[IMG_BREAK]", "[IMG_END]"), max_model_len=1_000_000)
        (folder / "config.json").write_text('{"model_type": "mistral3"}')
        write_processor(folder)
        of_images = {"features": {"inputs": {"max_inputs": {"image": 8}, "files": str(folder)}}}
        self.info = dataclasses.replace(self.info, model_folder=str(folder), **of_images)
        self.inputs = ()

    async def generate(self, prompt, *args, **kwargs):
        self.inputs = prompt.inputs
        async for output in super().generate(prompt, *args, **kwargs):
            yield output


@pytest.fixture
def engine(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    return SeeingEngine(folder)


@pytest.fixture
def image(tmp_path):
    path = tmp_path / "picture.png"
    random_image(64, 48, seed=1).save(path)
    return path


def assert_saw(engine, path):
    """The last request had the file's pixels, as transformers resizes them."""
    [item] = engine.inputs
    seen = np.frombuffer(item.data, np.uint8).reshape(item.shape)[0]
    with Image.open(path) as opened:
        prepared = reference_processor()(opened.convert("RGB"), do_rescale=False, do_normalize=False)
    np.testing.assert_array_equal(seen, np.asarray(prepared["pixel_values"][0]).transpose(1, 2, 0))


@pytest.mark.client
@pytest.mark.skipif(test_claude_code.CLAUDE is None, reason="Claude Code is not installed")
def test_claude_code_reads_an_image_file(tmp_path, engine, image):
    call = {"name": "Read", "arguments": {"file_path": str(image)}}
    engine.answers = [f"I look.<tool_call>{json.dumps(call)}</tool_call>"]
    engine.text = "It is noise."
    with served(engine, api_keys=("key",)) as url:
        result = test_claude_code.run_claude(url, tmp_path, "What is in picture.png?", "--allowedTools", "Read")
    assert (result["is_error"], result["result"], result["num_turns"]) == (False, "It is noise.", 2)
    assert_saw(engine, image)


@pytest.mark.client
@pytest.mark.skipif(test_codex.CODEX is None, reason="Codex is not installed")
def test_codex_sends_an_image_with_its_prompt(tmp_path, engine, image):
    engine.text = "It is noise."
    with served(engine, api_keys=("key",)) as url:
        result = test_codex.run_codex(url, tmp_path, "What is it?", f"--image={image}")
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == "It is noise."
    assert_saw(engine, image)
