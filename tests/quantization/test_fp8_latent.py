"""fp8 checkpoints of a family with latent attention and experts, as DeepSeek V3, R1 and Kimi K2 are published."""

import numpy as np
import pytest
import torch
import transformers

from jaxis.kernels import native as native_kernels
from jaxis.kernels.weights import BlockScaledWeight, PackedWeight, as_weight
from tests.support.block_checkpoints import write_fp8
from tests.support.quantized_models import IDS, load, logits
from tests.support.tiny_checkpoints import LATENT_SIZES, write_checkpoint

# Several blocks, the last of them cut off, along either side.
SIZES = {"hidden_size": 192, "intermediate_size": 320, "moe_intermediate_size": 136, "kv_lora_rank": 144}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """(In fp8, with the weights it stands for.)"""
    source = tmp_path_factory.mktemp("source") / "deepseek_v3"
    write_checkpoint(source, "deepseek_v3", tokenizer=False, **LATENT_SIZES | SIZES)
    return write_fp8(tmp_path_factory.mktemp("fp8"), source)


@pytest.mark.sampled
@pytest.mark.parametrize("native", [False, True])
def test_logits_are_those_of_the_weights_that_fp8_stands_for(folders, native):
    if native and not native_kernels.usable():
        pytest.skip("needs the native kernels")
    fp8, wide = folders
    reference = transformers.AutoModelForCausalLM.from_pretrained(wide, dtype=torch.float32).eval()
    with torch.no_grad():
        expected = reference(torch.tensor([IDS])).logits[0].numpy()
    model = load(fp8, native=native)
    np.testing.assert_allclose(logits(model), expected, rtol=0, atol=1e-5 * np.abs(expected).max())
    attention = model.model.layers[1].self_attn
    assert isinstance(attention.q_b_proj.weight.get_value(), PackedWeight if native else BlockScaledWeight)
    # What attention needs one head at a time is in floats.
    by_head = attention.kv_b_proj.key_weight if native else attention.kv_b_proj.weight
    assert as_weight(by_head.get_value()).storage == "float32"
