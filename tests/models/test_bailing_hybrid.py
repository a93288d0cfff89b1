"""Names of tensors in Ling's checkpoints, whose writers differ."""

import pytest

from jaxis.layers.checkpoint_names import CheckpointNames
from jaxis.models.bailing_hybrid import BailingHybridForCausalLM


@pytest.mark.parametrize("name", ["attention.dense", "attention.o_proj"])
@pytest.mark.parametrize("layer", [0, 1])
def test_the_last_projection_of_attention_is_one_tensor_under_both_names(name, layer):
    config = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"], "layer_group_size": 2}
    renames = BailingHybridForCausalLM.all_renames(_Config(config))
    names = CheckpointNames(renames, BailingHybridForCausalLM.other_names)
    assert names.name_here(f"model.layers.{layer}.{name}.weight") == f"model.layers.{layer}.self_attn.o_proj.weight"
    written = "dense" if layer == 1 else "o_proj"
    assert names.name_in_checkpoint(f"model.layers.{layer}.self_attn.o_proj.weight") == (
        f"model.layers.{layer}.attention.{written}.weight"
    )


class _Config(dict):
    """Keys of config.json that `all_renames` reads."""
