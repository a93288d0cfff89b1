"""Llama 4 as it is published: a checkpoint with a vision model, of which the text is served."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from safetensors.numpy import load_file, save_file

from jaxis import LLM, SamplingParams
from jaxis.errors import CheckpointError, ConfigError
from tests.support.parity import FAMILIES, GREEDY_TOKENS, checkpoint_folder, reference_greedy_tokens, reference_model

TEXT = next(family for family in FAMILIES if family.name == "Llama 4")
VISION = {
    **{"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28},
    **{"vision_output_dim": 16, "projector_input_dim": 16, "projector_output_dim": 16},
}
SETTINGS = {"dtype": "float32", "kv_cache_memory": "1MiB", "max_num_batched_tokens": 64, "show_progress": False}


@pytest.fixture(scope="module")
def conditional_folder(tmp_path_factory):
    """The text model of the parity row with a vision model beside it, as transformers saves both."""
    folder = tmp_path_factory.mktemp("llama4")
    config = transformers.Llama4Config(text_config=reference_model(TEXT).config.to_dict(), vision_config=VISION)
    model = transformers.Llama4ForConditionalGeneration(config).eval()
    model.language_model.load_state_dict(reference_model(TEXT).state_dict())
    model.save_pretrained(folder)
    names = load_file(folder / "model.safetensors").keys()
    assert {name.split(".")[0] for name in names} == {"language_model", "multi_modal_projector", "vision_model"}
    return folder


def changed_folder(source, folder, *, tensors=lambda tensors: tensors, **config):
    values = json.loads((source / "config.json").read_text()) | config
    (folder / "config.json").write_text(json.dumps(values))
    save_file(tensors(load_file(source / "model.safetensors")), folder / "model.safetensors")
    return folder


@pytest.mark.slow
def test_text_of_a_checkpoint_that_also_sees_is_served(conditional_folder, capsys):
    prompt = np.random.default_rng(0).integers(1, 131, 90).tolist()
    with LLM(conditional_folder, **SETTINGS | {"show_progress": True}) as llm:
        assert "only the text part of this model is served" in capsys.readouterr().err
        with torch.no_grad():
            expected = reference_model(TEXT)(torch.tensor([prompt])).logits[0].numpy()
        for path in ("whole", "paged"):
            logits = llm.compute_logits(prompt, path=path)
            np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-4 * np.abs(expected).max())
        [output] = llm.generate(prompt, SamplingParams(temperature=0, max_tokens=GREEDY_TOKENS, ignore_eos=True))
        assert output.outputs[0].token_ids == reference_greedy_tokens(TEXT, prompt)


def test_other_tensors_and_keys_are_errors_still(conditional_folder, tmp_path):
    (tmp_path / "tensor").mkdir()
    extra = changed_folder(
        conditional_folder, tmp_path / "tensor", tensors=lambda t: t | {"audio_model.weight": np.zeros(3, np.float32)}
    )
    with pytest.raises(CheckpointError, match=r"tensor 'audio_model.weight' \[3\] has no parameter"):
        LLM(extra, **SETTINGS)
    (tmp_path / "key").mkdir()
    with pytest.raises(ConfigError, match="keys that Llama4ForConditionalGeneration does not know: audio_config"):
        LLM(changed_folder(conditional_folder, tmp_path / "key", audio_config={"a": 1}), **SETTINGS)


def test_an_unknown_layer_type_is_refused(tmp_path):
    config = json.loads(Path(checkpoint_folder(TEXT), "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"layer_types": ["linear_attention"] * 4}))
    with pytest.raises(ConfigError, match=r"layer_types\[0\]='linear_attention' in .* is not supported"):
        LLM(tmp_path, load_format="dummy", **SETTINGS)


@pytest.mark.slow
def test_layers_without_a_list_follow_the_interval(tmp_path):
    """Every `no_rope_layer_interval`-th layer has no rope; an empty list, as published, is as none."""
    source = Path(checkpoint_folder(TEXT))
    config = json.loads((source / "config.json").read_text())
    expected = config.pop("no_rope_layers")
    assert expected == [1, 0]
    prompt = np.random.default_rng(1).integers(1, 131, 60).tolist()
    with torch.no_grad():
        expected_logits = reference_model(TEXT)(torch.tensor([prompt])).logits[0].numpy()
    for layers in (None, []):
        folder = tmp_path / str(layers)
        folder.mkdir()
        (folder / "model.safetensors").symlink_to(source / "model.safetensors")
        values = config | {"no_rope_layers": layers, "layer_types": None, "moe_layers": None}
        (folder / "config.json").write_text(json.dumps(values))
        with LLM(folder, **SETTINGS) as llm:
            logits = llm.compute_logits(prompt)
        np.testing.assert_allclose(logits, expected_logits, rtol=0, atol=1e-4 * np.abs(expected_logits).max())
