"""DFlash heads draft what transformers' generator drafts with them, step after step, and refuse other models."""

from __future__ import annotations

import json

import pytest

from jaxis.config import ModelConfig, VllmConfig
from jaxis.config.hf_config import HFConfig
from jaxis.errors import CheckpointError, ConfigError
from jaxis.models.draft_loader import load_dflash
from jaxis.models.model_loader import load_model
from jaxis.parallel.mesh import make_mesh
from tests.support.dflash_checkpoints import (
    BLOCK_SIZE,
    CONFIG,
    ReferenceDrafts,
    write_dflash_head,
    write_qwen3_target,
    write_transformers_head,
)
from tests.support.draft_runs import NUM_DRAFTS, make_runner, run
from tests.support.parity import prompt
from tests.support.quick_rows import quick_rows

assert NUM_DRAFTS == BLOCK_SIZE - 1, "transformers drafts whole blocks"

WINDOW = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 19}
FORMS = {
    "whole context": lambda folder: write_dflash_head(folder),
    "causal windows": lambda folder: write_dflash_head(folder, **WINDOW, use_sliding_window=True),
    "windows in both directions": lambda folder: write_transformers_head(folder, **WINDOW),
}


def of_dflash(**settings):
    """Settings of a head, with these in `dflash_config`."""
    return {"dflash_config": CONFIG["dflash_config"] | settings}


@pytest.fixture(scope="module")
def loaded_target(target):
    config = VllmConfig(ModelConfig(str(target), HFConfig.from_folder(target), max_model_len=128))
    return load_model(config, make_mesh())


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return write_qwen3_target(tmp_path_factory.mktemp("target"))


@pytest.mark.parametrize(
    ("form", "chunk"),
    quick_rows(
        [(form, chunk) for form in FORMS for chunk in (16, 1, 64)],
        [("whole context", 16), ("windows in both directions", 16)],
    ),
)
def test_drafts_are_those_of_transformers_also_after_wrong_ones(target, tmp_path, form, chunk):
    head = FORMS[form](tmp_path / "dflash_head")
    reference, runner = ReferenceDrafts(target, head), make_runner((target, head), max_num_batched_tokens=chunk)
    prompts = [prompt(70), prompt(61), prompt(5)]
    plain, drafts = run(runner, prompts, num_tokens=16)
    check(reference, plain, drafts)
    sequences, drafts = run(runner, prompts, num_tokens=16, expected=plain)
    assert sequences == plain
    check(reference, sequences, drafts)
    runner.close()


def check(reference, sequences, drafts):
    for tokens, by_length in zip(sequences, drafts, strict=True):
        assert len(by_length) > 4
        for length, guesses in by_length.items():
            assert guesses == reference(tokens[:length])
    blocks = [guesses for by_length in drafts for guesses in by_length.values()]
    assert sum(len(set(block)) > 1 for block in blocks) > len(blocks) / 2, "the places of a block differ"


@pytest.mark.parametrize("form", ["whole context", "windows in both directions"])
def test_the_reference_of_these_tests_is_what_transformers_generates_with(target, tmp_path, form):
    reference = ReferenceDrafts(target, FORMS[form](tmp_path / "dflash_head"))
    tokens, drafts = reference.of_generation(prompt(61), 12)
    assert len(drafts) > 5
    for length, guesses in drafts.items():
        assert guesses == reference(tokens[:length])[: len(guesses)]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"block_size": None}, "has no 'block_size', which a DFlash head needs"),
        ({"dflash_config": {"target_layer_ids": [0, 2]}}, "has no 'mask_token_id', which a DFlash head needs"),
        ({"dflash_config": {"mask_token_id": 5}}, "has no 'target_layer_ids', which a DFlash head needs"),
        ({"dflash_config": 3}, "has dflash_config=3, expected an object"),
        ({"block_size": 1}, "has block_size=1, expected an integer of at least 2"),
        ({"block_size": "16"}, "has block_size='16', expected an integer"),
        (of_dflash(mask_token_id=131), "has mask_token_id=131, and the model has 131 tokens"),
        (of_dflash(mask_token_id=-1), "has mask_token_id=-1, expected an integer of at least 0"),
        (of_dflash(target_layer_ids=[2, 0]), r"has target_layer_ids=\[2, 0\], expected numbers of layers in ascending"),
        (of_dflash(target_layer_ids=[0, 2.5]), "expected numbers of layers in ascending order"),
        (of_dflash(target_layer_ids=[]), r"has target_layer_ids=\[\], expected numbers of layers"),
        (
            of_dflash(target_layer_ids=[0, 2, 5]),
            "reads what layers 0, 2, 5 of a model of at least 7 layers return",
        ),
        (of_dflash(target_layer_ids=[1, 16, 31]), "of at least 33 layers return, and the model has 6: it was not"),
        (
            of_dflash(attention_sink_bias=True),
            "dflash_config.attention_sink_bias=True, of which only False",
        ),
        (of_dflash(conv_kernel_size=2), "conv_kernel_size"),
        ({"num_target_layers": 36}, "of a model of at least 36 layers return, and the model has 6"),
        ({"vocab_size": 200}, "is for a model of 200 tokens, and the model has 131: it was not trained for this model"),
        ({"hidden_size": 32}, "is for a model of 32 features, and the model has 64: it was not trained for this model"),
        ({"architectures": ["Qwen3ForCausalLM"]}, "is not of a DFlash head, which is one of: DFlashDraftModel"),
        (
            {**WINDOW, "use_sliding_window": True, "sliding_window": None},
            "has no 'sliding_window', which a DFlash",
        ),
        ({"layer_types": ["full_attention"]}, r"layer_types\[1\]=None in .* is not supported"),
    ],
    ids=str,
)
def test_what_was_not_made_for_the_model_is_refused_in_one_line(loaded_target, tmp_path, settings, message):
    head = write_dflash_head(tmp_path, **settings)
    config = VllmConfig(ModelConfig(str(head), HFConfig.from_folder(head), max_model_len=128))
    with pytest.raises(ConfigError, match=message) as raised:
        load_dflash(loaded_target, config, make_mesh())
    assert "\n" not in str(raised.value)


def test_tensors_of_other_sizes_are_refused_by_name(loaded_target, tmp_path):
    head = write_dflash_head(tmp_path)
    config = json.loads((head / "config.json").read_text()) | {"intermediate_size": 64}
    (head / "config.json").write_text(json.dumps(config))
    config = VllmConfig(ModelConfig(str(head), HFConfig.from_folder(head), max_model_len=128))
    with pytest.raises(CheckpointError, match=r"layers\.0\.mlp"):
        load_dflash(loaded_target, config, make_mesh())
