"""DeepSeek V4.1's files as they are published, and configs that do not fit together."""

import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxis.config import ModelConfig, VllmConfig
from jaxis.config.hf_config import HFConfig
from jaxis.errors import ConfigError
from jaxis.models.model_loader import construct_abstractly, load_model
from jaxis.parallel.mesh import make_mesh
from tests.support import parity
from tests.support.published_models import read

FAMILY = next(family for family in parity.FAMILIES if family.name == "DeepSeek V4.1")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["DeepseekV41ForCausalLM", "DeepseekV41ForConditionalGeneration"])
def test_the_text_of_a_checkpoint_that_sees_and_drafts_is_loaded(name, tmp_path):
    source = Path(parity.checkpoint_folder(FAMILY))
    values = json.loads((source / "config.json").read_text())
    published = {"architectures": [name], "model_type": "deepseek_v41", "text_config": values, "image_token_id": 5}
    (tmp_path / "config.json").write_text(json.dumps(published | {"vision_config": {"hidden_size": 32}}))
    others = ("vision.blocks.0.w1.weight", "aligner.w1.weight", "image_start", "image_pad", "mtp.0.norm.weight")
    tensors = load_file(source / "model.safetensors") | {other: np.zeros(3, np.float32) for other in others}
    save_file(tensors, tmp_path / "model.safetensors")
    config = ModelConfig(str(tmp_path), HFConfig.from_folder(tmp_path), dtype=jnp.float32, max_model_len=1024)
    model = load_model(VllmConfig(config), make_mesh())
    logits, expected = (parity.run_model(each, (17,))[17][0] for each in (model, parity.loaded_model(FAMILY)))
    assert np.array_equal(logits, expected)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"kv_source_layer_ids": [8, 14, 20]}, "where layer 2, of ratio 2, does not fit its source"),
        ({"kv_source_layer_ids": [2, 8, 14, 21]}, "where layer 20, of ratio 1, does not fit its source"),
        ({"index_source_layer_ids": [2, 8, 20, 24]}, "where layer 14, of ratio 2, .* or a source does not select"),
        ({"candidate_source_layer_id": 14}, "candidate_source_layer_id=14.* expected the last of kv_source_layer_ids"),
        (
            {"candidate_topk_blocks": 16},
            "index_topk=512 and text_config.candidate_topk_blocks=16.* expected candidates for as many",
        ),
        ({"engram_num_embeddings": [384006168, 384]}, "engram_num_embeddings.* n-grams have more rows than that"),
        ({"compress_ratios": [0, 0, 2]}, "compress_ratios.* expected one for each of 40 layers"),
        ({"num_key_value_heads": 2}, "num_key_value_heads=2"),
    ],
)
def test_what_does_not_fit_together_is_refused(changes, said):
    values = read("deepseek-v4.1-flash")
    config = HFConfig(values | {"quantization_config": None, "text_config": values["text_config"] | changes})
    with pytest.raises(ConfigError, match=said):
        construct_abstractly(VllmConfig(ModelConfig("", config, dtype=jnp.bfloat16, max_model_len=4096)))
