"""Copies of a checkpoint that sees: quantized, and in Orbax's format. They see what it sees."""

import numpy as np
import pytest

from jaxis import LLM, SamplingParams
from jaxis.bringup.convert.convert import convert_checkpoint
from jaxis.bringup.convert.to_gguf import convert_to_gguf
from jaxis.loading.open_checkpoint import open_checkpoint
from jaxis.models.common.towers.pixtral import PixtralVision
from jaxis.quantization.arguments import parse_quantization
from jaxis.quantization.checkpoint import quantize_checkpoint
from tests.support.vision_checkpoints import random_image, write_mistral3


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mistral3")
    write_mistral3(folder)
    return folder


def tower_of(folder):
    with open_checkpoint(folder) as checkpoint:
        return {name: checkpoint.tensor(name).copy() for name in checkpoint.names() if PixtralVision.has_tensor(name)}


def answer(folder, **arguments):
    """Tokens of a greedy answer to a question about an image."""
    content = [{"type": "image", "image": random_image(40, 24)}, {"type": "text", "text": "What?"}]
    sizes = {"max_num_batched_tokens": 48, "block_size": 16, "max_model_len": 512, "kv_cache_memory": "2MiB"}
    with LLM(str(folder), show_progress=False, **sizes, **arguments) as llm:
        params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
        [output] = llm.chat([{"role": "user", "content": content}], params, progress=False)
    return output.outputs[0].token_ids


def check_tower(folder, source):
    copied, tower = tower_of(folder), tower_of(source)
    assert copied.keys() == tower.keys()
    assert tower
    assert all(np.array_equal(copied[name], tower[name]) for name in tower)


def test_a_quantized_copy_keeps_the_tower_as_it_is(source, tmp_path):
    quantize_checkpoint(source, tmp_path / "copy", parse_quantization("int8"))
    check_tower(tmp_path / "copy", source)


@pytest.mark.slow
@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_a_quantized_copy_sees(source, tmp_path, quantization):
    quantize_checkpoint(source, tmp_path / "copy", parse_quantization(quantization))
    check_tower(tmp_path / "copy", source)
    assert answer(tmp_path / "copy") == answer(source, quantization=quantization)


def test_a_gguf_file_is_said_to_have_the_text_alone(source, tmp_path):
    notes = []
    convert_to_gguf(source, tmp_path / "model.gguf", on_note=notes.append)
    [note] = notes
    assert note.startswith(f"the file has the text alone: {len(tower_of(source))} tensors of other parts")


@pytest.mark.slow
def test_an_orbax_checkpoint_has_the_tower_and_gives_it_back(source, tmp_path):
    convert_checkpoint(source, tmp_path / "orbax", "orbax")
    check_tower(tmp_path / "orbax", source)
    assert answer(tmp_path / "orbax") == answer(source)
    convert_checkpoint(tmp_path / "orbax", tmp_path / "again", "hf")
    check_tower(tmp_path / "again", source)
