"""Embeddings and head that are one table, changed under one of their names: against PEFT's model and transformers."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file, save_model

from jaxis import LLM, SamplingParams
from jaxis.bringup.convert.convert import convert_checkpoint
from jaxis.bringup.convert.to_gguf import convert_to_gguf
from jaxis.bringup.verify.compare import relative_error
from jaxis.errors import CheckpointError, ConfigError
from jaxis.lora import LoRARequest
from jaxis.lora.merged_checkpoint import write_merged
from jaxis.models.tied_tables import config_as_stored
from jaxis.quantization.checkpoint import quantize_checkpoint
from jaxis.quantization.rules import RuleQuantizationConfig
from jaxis.quantization_rules import QuantizationRule
from tests.support.adapters import base_model, reference_logits, save_adapter
from tests.support.quick_rows import quick_rows
from tests.support.tiny_checkpoints import write_checkpoint

TOKENS = [5, 100, 7, 8, 9, 400, 11, 12]
EMBEDDINGS, HEAD = "model.embed_tokens.weight", "lm_head.weight"
_GATE = 3e-5
# What PEFT can do to one table under two names; with each, whether the merged model has one table.
CONFIGS = {
    "whole embeddings": ({"modules_to_save": ["embed_tokens"]}, False),
    "whole head": ({"modules_to_save": ["lm_head"]}, False),
    "both whole": ({"modules_to_save": ["embed_tokens", "lm_head"]}, False),
    "both whole, tied": ({"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True}, True),
    "embeddings": ({"target_modules": ["embed_tokens", "v_proj"]}, False),
    "head": ({"target_modules": ["lm_head", "v_proj"]}, False),
    "both": ({"target_modules": ["embed_tokens", "lm_head"]}, False),
    "both, tied": ({"target_modules": ["lm_head", "v_proj"], "ensure_weight_tying": True}, False),
    "both, tied, by the embeddings": ({"target_modules": ["embed_tokens"], "ensure_weight_tying": True}, False),
    "rows": ({"trainable_token_indices": [5, 9, 400]}, True),
    "rows of both": ({"trainable_token_indices": {"embed_tokens": [5, 9], "lm_head": [5, 9]}}, True),
    "rows that differ": ({"trainable_token_indices": {"embed_tokens": [5, 9], "lm_head": [7]}}, False),
    "rows of the head": ({"trainable_token_indices": {"lm_head": [7, 11]}}, False),
}
_QUICK = {"whole embeddings", "head", "rows"}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("base")
    return write_checkpoint(folder, "qwen2", tie_word_embeddings=True, num_hidden_layers=2)


@pytest.fixture(scope="module")
def apart(base, tmp_path_factory):
    """A checkpoint with two tables that differ, though its config ties them."""
    folder = tmp_path_factory.mktemp("apart") / "model"
    write_checkpoint(folder, "qwen2", tie_word_embeddings=False, num_hidden_layers=2)
    _set_tie(folder, is_tied=True)
    return folder


def _set_tie(folder, *, is_tied):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"tie_word_embeddings": is_tied}))


def _logits(folder, **arguments):
    with LLM(str(folder), max_model_len=64, dtype="float32", show_progress=False, **arguments) as llm:
        return llm.compute_logits(TOKENS)


def _reference(folder):
    with torch.no_grad():
        return base_model(folder)(torch.tensor([TOKENS])).logits[0].numpy()


@pytest.mark.sampled
@pytest.mark.parametrize("kind", quick_rows(CONFIGS, _QUICK))
def test_merged_models_are_pefts(base, tmp_path, kind):
    config, is_one_table = CONFIGS[kind]
    adapter, merged = save_adapter(base, tmp_path / "adapter", **config), tmp_path / "merged"
    expected = reference_logits(base, adapter, TOKENS)
    assert relative_error(_logits(base, adapter=adapter, merge=True), expected) < _GATE
    merged.mkdir()
    write_merged(base, adapter, merged)
    assert relative_error(_logits(merged), expected) < _GATE
    assert relative_error(_reference(merged), expected) < _GATE
    assert json.loads((merged / "config.json").read_text())["tie_word_embeddings"] is is_one_table
    assert {EMBEDDINGS, HEAD} & load_file(merged / "model.safetensors").keys() == (
        {EMBEDDINGS} if is_one_table else {EMBEDDINGS, HEAD}
    )


@pytest.mark.sampled
@pytest.mark.parametrize("name", [HEAD, EMBEDDINGS])
def test_the_table_of_a_tied_model_may_have_either_name(base, tmp_path, name):
    reference = base_model(base)
    folder = tmp_path / "model"
    reference.save_pretrained(folder)
    if name == HEAD:
        save_model(reference, str(folder / "model.safetensors"), metadata={"format": "pt"})
    assert [key for key in load_file(folder / "model.safetensors") if key in (EMBEDDINGS, HEAD)] == [name]
    adapter = save_adapter(base, tmp_path / "adapter", modules_to_save=["embed_tokens"])
    assert relative_error(_logits(folder), _reference(base)) < _GATE
    assert relative_error(_logits(folder, adapter=adapter, merge=True), reference_logits(base, adapter, TOKENS)) < _GATE


def test_tables_that_differ_are_two_whatever_the_config_says(apart):
    expected = _reference(apart)
    assert config_as_stored(apart)["tie_word_embeddings"] is False
    assert relative_error(_logits(apart), expected) < _GATE


def test_a_head_that_is_not_there_is_not_made_up(apart, tmp_path):
    folder = tmp_path / "model"
    base_model(apart).save_pretrained(folder)
    path = folder / "model.safetensors"
    save_file({name: tensor for name, tensor in load_file(path).items() if name != HEAD}, path, {"format": "pt"})
    _set_tie(folder, is_tied=False)
    with pytest.raises(CheckpointError, match=r"lm_head\.weight; if the head is the embeddings, say so with"):
        _logits(folder)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["one table", "its other name", "two"])
def test_copies_in_other_formats_have_the_same_tables(base, apart, tmp_path, kind):
    source = tmp_path / "source"
    model = base_model(apart if kind == "two" else base)
    model.save_pretrained(source)
    _set_tie(source, is_tied=True)
    for file in base.glob("tokenizer*"):
        (source / file.name).write_bytes(file.read_bytes())
    if kind == "its other name":
        save_model(model, str(source / "model.safetensors"), metadata={"format": "pt"})
    expected = _reference(source)
    convert_checkpoint(source, tmp_path / "orbax", "orbax")
    convert_checkpoint(tmp_path / "orbax", tmp_path / "back", "hf")
    convert_to_gguf(source, tmp_path / "model.gguf", "f32")
    rules = RuleQuantizationConfig([QuantizationRule(r"model\.layers\.0\.mlp\..*", "int8")])
    quantize_checkpoint(source, tmp_path / "quantized", rules)
    for copy in ("orbax", "back", "model.gguf"):
        assert relative_error(_logits(tmp_path / copy), expected) < _GATE, copy
    assert relative_error(_logits(tmp_path / "quantized"), expected) < 0.05
    whole = RuleQuantizationConfig([QuantizationRule(".*", "int8")])
    quantize_checkpoint(source, tmp_path / "whole", whole)
    assert relative_error(_logits(tmp_path / "whole"), expected) < 0.1


def test_rows_of_tokens_are_the_same_for_all_requests(base, tmp_path):
    adapter = save_adapter(base, tmp_path / "adapter", trainable_token_indices=[5, 9])
    with (
        LLM(str(base), enable_lora=True, max_model_len=64, show_progress=False) as llm,
        pytest.raises(ConfigError, match=r"replaces rows of 'model\.embed_tokens'.* merge it while loading"),
    ):
        llm.generate(
            [{"prompt_token_ids": TOKENS}], SamplingParams(max_tokens=1), lora_request=LoRARequest("a", 1, adapter)
        )


def test_rows_beyond_the_vocabulary_are_refused(base, tmp_path):
    adapter = save_adapter(base, tmp_path / "adapter", trainable_token_indices=[5, 9])
    path = adapter / "adapter_config.json"
    path.write_text(path.read_text().replace("9", "99999"))
    with pytest.raises(CheckpointError, match="trained on another model"):
        _logits(base, adapter=adapter, merge=True)


def test_both_names_of_a_table_are_one_change(base, tmp_path):
    """A tied checkpoint may repeat its table under the head's name."""
    folder = tmp_path / "model"
    base_model(base).save_pretrained(folder)
    path = folder / "model.safetensors"
    tensors = load_file(path)
    save_file(tensors | {HEAD: tensors[EMBEDDINGS].clone()}, path, {"format": "pt"})
    adapter = save_adapter(base, tmp_path / "adapter", trainable_token_indices=[5, 9, 400])
    expected = reference_logits(base, adapter, TOKENS)
    assert relative_error(_logits(folder, adapter=adapter, merge=True), expected) < _GATE
    assert not np.allclose(expected, _reference(base))
