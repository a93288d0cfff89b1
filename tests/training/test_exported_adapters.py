"""Adapters that jaxis trains open in PEFT, over each family's model of transformers, and compute the same there.

`pytest -s -m "" tests/training/test_exported_adapters.py` prints a row of a table for each family.
"""

import copy
import json
import shutil
import warnings

import jax
import numpy as np
import peft
import pytest
import torch
from peft.utils.transformers_weight_conversion import _MODEL_TO_CONVERSION_PATTERN
from safetensors.numpy import load_file, save_file

from jaxis.errors import ConfigError
from jaxis.host.progress import ProgressDisplay
from jaxis.training.base_model import open_base_model
from jaxis.training.batches import Batches, BatchShape
from jaxis.training.objectives import CrossEntropy
from jaxis.training.step import make_evaluation
from jaxis.training.trainable import make_trainable
from tests.support import parity, training
from tests.support.parity import FAMILIES
from tests.support.quick_rows import quick_rows
from tests.support.tiny_checkpoints import write_tokenizer
from tests.training.gradients import random_examples

QUICK = ("GPT-2", "Command A Vision")
# Their checkpoints have names of code that is not transformers'.
ELSEWHERE = ("LFM3", "EXAONE", "Step 3.5", "InternLM 2", "Ling 2", "Ling 2.5")
# All but one whose config.json has a key that nothing reads, which loading refuses, and those that are not trained.
REFUSED = ("EXAONE 4, no windows", "Qwen3.8-Flash-Next", "LongCat-Flash-Lite", "LongCat 2.0")
ROWS = {family.name: family for family in FAMILIES if family.name not in (*REFUSED, *ELSEWHERE)}
# PEFT takes these names of a mixture of experts for those of its experts, also where a dense layer is meant.
TAKEN_FOR_EXPERTS = ["gate_proj", "up_proj", "down_proj"]
# PEFT's own names of the layers of these families.
NAMED = {"GPT-2": ["c_attn", "c_proj", "c_fc"], "StarCoder": ["c_attn"], "Command A Vision": ["q_proj", "v_proj"]}


def trained_adapters(folder, tmp_path, **settings):
    """A model with adapters of random weights: the model, and what is trained."""
    write_tokenizer(folder)
    rows = training.write_rows(tmp_path / "rows.jsonl", [training.dialogue("Count.", "One, two, three.")])
    config = training.train_config(folder, rows, tmp_path / "out", peft={"lora_r": 4, "lora_alpha": 8, **settings})
    model = make_trainable(config, open_base_model(config), ProgressDisplay(enabled=False))
    generator = np.random.default_rng(0)
    return model, {
        name: jax.numpy.asarray(0.3 * generator.normal(size=value.shape), value.dtype)
        for name, value in model.initial.items()
    }


@pytest.mark.sampled
@pytest.mark.parametrize("name", quick_rows(ROWS, QUICK))
def test_an_exported_adapter_computes_the_same_in_peft(name, tmp_path):
    family, folder = ROWS[name], tmp_path / "model"
    shutil.copytree(parity.checkpoint_folder(family), folder)
    reference = copy.deepcopy(parity.reference_model(family))
    left_out = TAKEN_FOR_EXPERTS if reference.config.model_type in _MODEL_TO_CONVERSION_PATTERN else None
    model, trained = trained_adapters(
        folder, tmp_path, lora_target_modules=NAMED.get(name), lora_exclude_modules=left_out
    )
    examples = random_examples()
    batch = Batches([(each,) for each in examples], BatchShape(1, 1, 48), seed=None, packs=True).batch(0)
    evaluate = make_evaluation(model.forward(is_training=False), CrossEntropy(), model.combine)
    total, weight, _ = evaluate(trained, model.frozen, batch)
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    model.write(adapter, {part: np.asarray(value) for part, value in trained.items()})
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*fan_in_fan_out.*")
        adapted = peft.PeftModel.from_pretrained(reference, str(adapter)).eval()
    with torch.no_grad():
        expected = training.torch_loss(adapted, examples).item()
        with adapted.disable_adapter():
            plain = training.torch_loss(adapted, examples).item()
    error = abs(float(total) / float(weight) - expected) / expected
    print(f"\n| {name} | {error:.1e} | {abs(plain - expected) / expected:.1e} |")
    assert abs(plain - expected) / expected > 1e-3
    assert error < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize(("name", "layer"), [("Jamba", "dt_proj"), ("Falcon Mamba", "out_proj")])
def test_a_layer_that_peft_cannot_adapt_is_refused_by_name(name, layer, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(parity.checkpoint_folder(ROWS[name]), folder)
    with pytest.raises(ConfigError, match=rf"lora_target_modules names '.*{layer}', .*: leave it out"):
        trained_adapters(folder, tmp_path, lora_target_modules=["in_proj", layer])


def test_an_adapter_of_gpt2_has_pefts_names_whichever_its_checkpoint_has(tmp_path):
    """GPT-2's first checkpoints lack the prefix of transformers' modules; PEFT finds its weights as [in, out]."""
    folder = tmp_path / "model"
    shutil.copytree(parity.checkpoint_folder(ROWS["GPT-2"]), folder)
    tensors = load_file(folder / "model.safetensors")
    save_file(
        {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}, folder / "model.safetensors"
    )
    model, trained = trained_adapters(folder, tmp_path, lora_target_modules=["c_attn"])
    model.write(tmp_path, {part: np.asarray(value) for part, value in trained.items()})
    names = load_file(tmp_path / "adapter_model.safetensors")
    assert "base_model.model.transformer.h.0.attn.c_attn.lora_A.weight" in names
    assert json.loads((tmp_path / "adapter_config.json").read_text())["fan_in_fan_out"] is True
