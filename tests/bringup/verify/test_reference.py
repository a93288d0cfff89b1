"""The reference: however its weights are held, its numbers are the same."""

import types

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from jaxis.bringup.verify import reference as module
from jaxis.bringup.verify.compare import relative_error
from jaxis.bringup.verify.recording import LOGITS
from jaxis.bringup.verify.reference import Reference, complete_config
from jaxis.bringup.verify.shrink import tiny_twin
from jaxis.errors import ConfigError
from tests.bringup.verify.verified_models import TOKEN_IDS, published
from tests.support import parity

QWEN = next(family for family in parity.FAMILIES if family.name == "Qwen3.5")


@pytest.fixture(scope="module")
def wide():
    return Reference.random(twin_config())


@pytest.fixture(scope="module")
def bfloat16_folder(wide, tmp_path_factory):
    """Its checkpoint in bfloat16, in which every weight is exact."""
    folder = tmp_path_factory.mktemp("bfloat16")
    wide.save(folder, twin_config())
    reference = Reference.from_folder(folder)
    reference.model.to(torch.bfloat16)
    reference.save(folder, twin_config())
    return folder


def twin_config():
    config = published("gpt-oss-20b")
    return tiny_twin(config, complete_config(config)) | {"torch_dtype": "bfloat16"}


def with_free_memory(monkeypatch, nbytes):
    found = types.SimpleNamespace(available=nbytes / module.MEMORY_SHARE)
    monkeypatch.setattr(module.psutil, "virtual_memory", lambda: found)


def num_parameters(folder):
    return sum(p.numel() for p in Reference.from_folder(folder).model.parameters())


def test_weights_upcast_module_by_module_give_the_same_numbers(wide, bfloat16_folder, monkeypatch):
    with_free_memory(monkeypatch, 3 * num_parameters(bfloat16_folder))
    reference = Reference.from_folder(bfloat16_folder)
    assert "upcast" in reference.how
    for _ in range(2):  # the weights are back in their own type after each run
        assert {p.dtype for p in reference.model.parameters()} == {torch.bfloat16}
        assert relative_error(reference.logits(TOKEN_IDS), wide.logits(TOKEN_IDS)) < 1e-6
    assert reference.generate(TOKEN_IDS, 5).token_ids == wide.generate(TOKEN_IDS, 5).token_ids


def test_too_little_memory_is_one_error_that_says_what_to_do(bfloat16_folder, monkeypatch):
    with_free_memory(monkeypatch, num_parameters(bfloat16_folder))
    with pytest.raises(ConfigError, match="--save-golden FILE"):
        Reference.from_folder(bfloat16_folder)


def test_what_transformers_raises_is_one_error():
    with pytest.raises(ConfigError, match=r"transformers, cannot read the config: \w+: .*--golden FILE"):
        complete_config({"architectures": ["Qwen3ForCausalLM"], "rope_parameters": 3, "num_hidden_layers": "x"})


def test_every_parameter_of_a_twin_is_random(wide):
    state = wide.model.state_dict()
    assert any("sinks" in name for name in state)
    for name, tensor in state.items():
        assert tensor.float().std() > 0.03, name
        assert (tensor == tensor.bfloat16().float()).all(), name


def test_chosen_rows_are_those_of_all(wide):
    rows = np.asarray([0, 5, 47], np.int32)
    np.testing.assert_allclose(wide.logits(TOKEN_IDS, rows), wide.logits(TOKEN_IDS)[rows], atol=1e-5)


def test_a_recording_has_the_names_of_the_checkpoint():
    """Mixtral's sparse block has another name in transformers than in its checkpoints."""
    config = published("mixtral-8x7b")
    calls = Reference.random(tiny_twin(config, complete_config(config))).record(TOKEN_IDS)
    assert "model.layers.0.block_sparse_moe.gate" in calls
    assert not any(name.startswith("model.layers.0.mlp") for name in calls)
    assert calls[LOGITS].outputs.hidden.shape == (len(TOKEN_IDS), 131)


@pytest.mark.parametrize("prefix", ["model.", "model.language_model."])
def test_a_recording_has_the_prefix_of_the_files(prefix, tmp_path):
    """Prefixes of a text model that transformers loads from files of its own and from those of a model that sees."""
    made = Reference(parity.reference_model(QWEN), "random")
    config = made.model.config.to_dict() | {"architectures": ["Qwen3_5ForCausalLM"]}
    made.save(tmp_path, config)
    path = tmp_path / "model.safetensors"
    save_file(
        {name.replace("model.", prefix): tensor for name, tensor in load_file(path).items()}, path, {"format": "pt"}
    )
    for reference, expected in ((made, "model."), (Reference.from_folder(tmp_path), prefix)):
        assert f"{expected}layers.0.mlp.gate_proj" in reference.record(TOKEN_IDS[:5])


def test_generated_logits_are_those_of_the_sequence(wide):
    found = wide.generate(TOKEN_IDS, 4)
    logits = wide.logits([*TOKEN_IDS, *found.token_ids])[-5:-1]
    np.testing.assert_allclose(found.logits, logits, atol=1e-4)
    assert found.token_ids == logits.argmax(-1).tolist()
