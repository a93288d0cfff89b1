"""Checkpoints of decoders without their heads, as sentence-transformers saves them, against transformers."""

import json

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import save_file

from jaxis import LLM, SamplingParams
from jaxis.errors import CheckpointError, ConfigError
from tests.support.quick_rows import quick_rows
from tests.support.vision_families import FAMILIES as VISION_FAMILIES

SIZES = {
    "vocab_size": 131,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}
HEADS = {"num_key_value_heads": 2}
FAMILIES = {
    **dict.fromkeys(("Llama", "Mistral", "Qwen2"), HEADS),
    **dict.fromkeys(("Qwen3", "Gemma", "Gemma2"), HEADS | {"head_dim": 16}),
    "Phi3": HEADS,
    "GPT2": {"n_inner": 96},
    "GPTNeoX": {},
    "Bloom": {"intermediate_size": 256},
    "OPT": {"ffn_dim": 96, "word_embed_proj_dim": 64},
    "StableLm": HEADS,
}
# One of each way of naming the parts.
MULTIMODAL = ("Gemma 3", "Qwen2.5-VL", "Qwen3-VL", "Idefics3", "LLaVA 1.5", "Mistral 3", "Gemma 4", "PaddleOCR-VL")
IDS = [5, 77, 30, 12, 99, 42, 7, 3]


def saved(folder, family, **settings):
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**SIZES | FAMILIES[family] | settings)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 0.15)
    model.base_model.save_pretrained(folder)
    assert model.base_model.config.architectures == [type(model.base_model).__name__]
    return model


def assert_embeds_as(model, folder):
    with torch.no_grad():
        hidden = model.base_model(input_ids=torch.tensor([IDS])).last_hidden_state[0, -1].numpy()
    with LLM(folder, runner="pooling", dtype="float32", show_progress=False) as llm:
        [output] = llm.embed([{"prompt_token_ids": IDS}])
    vector = np.array(output.outputs.embedding)
    scale = np.linalg.norm(hidden) / np.linalg.norm(vector)
    np.testing.assert_allclose(vector * scale, hidden, rtol=0, atol=1e-5 * np.abs(hidden).max())


@pytest.mark.parametrize("family", quick_rows(FAMILIES, ["Mistral", "GPT2"]))
def test_vectors_are_the_last_hidden_states(family, tmp_path):
    assert_embeds_as(saved(tmp_path, family), tmp_path)


def vision_family(name):
    return next(each for each in VISION_FAMILIES if each.name == name)


def save_base(model, folder):
    """Writes the model without its head in the place of the whole one."""
    for name in ("model.safetensors", "config.json"):
        (folder / name).unlink()
    model.base_model.save_pretrained(folder)
    return json.loads((folder / "config.json").read_text())["architectures"]


@pytest.mark.parametrize("is_nested", [False, True])
@pytest.mark.parametrize("name", quick_rows(MULTIMODAL, ["Gemma 3", "Qwen2.5-VL"]))
def test_vectors_of_texts_are_those_of_the_multimodal_model(name, is_nested, tmp_path):
    """`is_nested`: names as transformers 4.52 to 4.57 wrote them, the model's own."""
    model = vision_family(name).write(tmp_path)
    assert save_base(model, tmp_path) == [type(model.base_model).__name__]
    if is_nested:
        save_file({key: each.contiguous() for key, each in own_tensors(model.base_model).items()},
                  tmp_path / "model.safetensors", {"format": "pt"})  # fmt: skip
    assert_embeds_as(model, tmp_path)


def own_tensors(model):
    return {name: each.clone() for name, each in model.state_dict().items()}


@pytest.mark.parametrize("name", ["Qwen3.5", "LFM2-VL"])
def test_recurrent_layers_are_named_as_the_reason_for_no_vectors(name, tmp_path):
    save_base(vision_family(name).write(tmp_path), tmp_path)
    with pytest.raises(
        ConfigError, match=r"ForConditionalGeneration has layers that cannot make vectors here"
    ) as error:
        LLM(tmp_path, runner="pooling", dtype="float32", show_progress=False)
    assert "\n" not in str(error.value)


def test_one_with_tied_embeddings_generates(tmp_path):
    model = saved(tmp_path, "Qwen3", tie_word_embeddings=True)
    with torch.no_grad():
        logprobs = torch.log_softmax(model(torch.tensor([IDS])).logits[0, -1], -1)
    with LLM(tmp_path, dtype="float32", show_progress=False) as llm:
        [output] = llm.generate([{"prompt_token_ids": IDS}], SamplingParams(temperature=0, max_tokens=1, logprobs=1))
    [token_id] = output.outputs[0].token_ids
    assert token_id == logprobs.argmax().item()
    assert output.outputs[0].logprobs[0][token_id].logprob == pytest.approx(logprobs.max().item(), abs=1e-4)


def test_one_without_a_head_says_that_it_cannot_generate(tmp_path):
    saved(tmp_path, "Llama", tie_word_embeddings=False)
    with pytest.raises(CheckpointError, match="the architecture LlamaModel, a model without the head") as error:
        LLM(tmp_path, dtype="float32", show_progress=False)
    assert "\n" not in str(error.value)
    assert "runner='pooling'" in str(error.value)
