"""Gemma 3 as published from 4B parameters on: with a vision model, and a short `text_config`."""

import numpy as np
import pytest
import torch
import transformers
from safetensors.numpy import load_file

from jaxis import LLM, SamplingParams
from jaxis.config.hf_config import HFConfig
from jaxis.config.usual_keys import CONFIG_DEFAULTS, with_defaults
from tests.support.parity import FAMILIES, GREEDY_TOKENS, reference_greedy_tokens, reference_model

TEXT = next(family for family in FAMILIES if family.name == "Gemma 3")
VISION = {
    **{"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28},
    **{"patch_size": 14},
}


@pytest.fixture(scope="module")
def conditional_folder(tmp_path_factory):
    """The text model of the parity row with a vision model beside it, as transformers saves both."""
    folder = tmp_path_factory.mktemp("gemma3")
    text = reference_model(TEXT)
    config = transformers.Gemma3Config(
        text_config=text.config.to_dict(), vision_config=VISION, mm_tokens_per_image=4, image_token_index=130
    )
    model = transformers.Gemma3ForConditionalGeneration(config).eval()
    model.model.language_model.load_state_dict(text.model.state_dict())
    model.save_pretrained(folder)
    names = load_file(folder / "model.safetensors").keys()
    assert {name.split(".")[0] for name in names} == {"language_model", "multi_modal_projector", "vision_tower"}
    return folder


@pytest.mark.slow
def test_text_of_a_checkpoint_that_also_sees_is_served(conditional_folder):
    prompt = np.random.default_rng(0).integers(1, 130, 60).tolist()
    with torch.no_grad():
        expected = reference_model(TEXT)(torch.tensor([prompt])).logits[0].numpy()
    with LLM(conditional_folder, dtype="float32", kv_cache_memory="2MiB", show_progress=False) as llm:
        logits = llm.compute_logits(prompt)
        np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-4 * np.abs(expected).max())
        [output] = llm.generate(prompt, SamplingParams(temperature=0, max_tokens=GREEDY_TOKENS, ignore_eos=True))
    assert output.outputs[0].token_ids == reference_greedy_tokens(TEXT, prompt)


def test_what_a_published_text_config_leaves_out_is_what_transformers_has():
    expected = transformers.Gemma3TextConfig()
    for key, value in CONFIG_DEFAULTS["gemma3_text"].items():
        assert getattr(expected, key) == value, key
    sparse = {"model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34}
    config = HFConfig({"model_type": "gemma3", "text_config": sparse}).get_text_config()
    assert (config["hidden_size"], config["vocab_size"], config["num_attention_heads"]) == (2560, 262_208, 8)
    assert with_defaults({"model_type": "llama"}) == {"model_type": "llama"}
