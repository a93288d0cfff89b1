"""Experts that lie whole on devices: the answers of one device, each device with its own experts only."""

import dataclasses
import json
from pathlib import Path

import gguf
import pytest

from jaxis import LLM
from jaxis.errors import ConfigError
from tests.support import parity
from tests.support.block_checkpoints import write_fp8, write_mxfp4
from tests.support.compressed_checkpoints import config_of, encoded_by, scheme_of, write_stored
from tests.support.gguf_models import write_gguf
from tests.support.simulated_devices import run_on_devices

# Those of the parity table, with as many heads and experts as 8 devices can share, and features in whole groups.
_HEADS = {"num_attention_heads": 8, "hidden_size": 64}
_EXPERTS = ("n_routed_experts", "num_local_experts", "num_experts")
_FEATURES = ("moe_intermediate_size", "intermediate_size")


def checkpoint(name: str) -> Path:
    family = next(family for family in parity.FAMILIES if family.name == name)
    experts = {key: 8 for key in _EXPERTS if key in family.config}
    features = {key: 64 for key in _FEATURES if key in family.config}
    latent = {"num_key_value_heads": 8} if "kv_lora_rank" in family.config else {}
    family = dataclasses.replace(family, config={**family.config, **_HEADS, **experts, **features, **latent})
    return Path(parity.checkpoint_folder(family))


def fp8(folder: Path) -> Path:
    return write_fp8(folder, checkpoint("DeepSeek V3"), block=(32, 32))[0]


def mxfp4(folder: Path) -> Path:
    return write_mxfp4(folder, checkpoint("GPT-OSS"))[0]


def compressed_int4(folder: Path) -> Path:
    weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True}
    scheme = scheme_of("pack-quantized", weights)
    source = checkpoint("Qwen3 MoE")
    return write_stored(folder, source, encoded_by(scheme), config_of(scheme, ignore=("lm_head", "re:.*mlp.gate$")))[0]


def gguf_blocks(folder: Path) -> Path:
    blocks = gguf.GGMLQuantizationType.Q4_1

    def quantize(name: str, tensor):
        return (gguf.quantize(tensor, blocks), blocks) if "exps" in name else None

    write_gguf(checkpoint("Qwen3 MoE"), folder / "model.gguf", quantize=quantize)
    return folder / "model.gguf"


def run(name: str, folder: Path, *arguments: str) -> None:
    run_on_devices("-m", "tests.engine.expert_parallel", name, str(folder), *arguments, num_devices=8)


@pytest.mark.multi_device
@pytest.mark.parametrize("family", ["DeepSeek V3", "Qwen3 MoE", "GPT-OSS", "Llama 4"])
def test_every_number_of_devices_answers_as_one(family):
    """Some devices have no token in a step. test_data_ranks.py and the kernels' tests have parts of it every time."""
    run("answers", checkpoint(family), "2,4,8")


@pytest.mark.multi_device
@pytest.mark.parametrize("rule", [{"weight_qtype": "int8"}, {"weight_qtype": "int4", "tile_size": 32}])
def test_experts_quantized_while_loading(rule):
    run("answers", checkpoint("Qwen3 MoE"), "4,8", json.dumps([{"module_path": ".*experts.*", **rule}]))


@pytest.mark.multi_device
@pytest.mark.parametrize("write", [fp8, mxfp4, compressed_int4, gguf_blocks])
def test_stored_formats(write, tmp_path):
    run("answers", write(tmp_path), "2,8")


@pytest.mark.multi_device
def test_padding_goes_to_no_expert():
    run("padding", checkpoint("Qwen3 MoE"))


def test_a_model_without_experts_is_refused():
    with pytest.raises(ConfigError, match="has no experts that can be spread over devices: leave it out"):
        LLM(enable_expert_parallel=True, show_progress=False)
