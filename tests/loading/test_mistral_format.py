"""Folders in Mistral's own format run as the models that transformers has in its own."""

import json
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxis import LLM, SamplingParams
from jaxis.bringup.analyze.analysis import analyze
from jaxis.bringup.verify.compare import relative_error
from jaxis.bringup.verify.source import find_source
from jaxis.config.hf_config import HFConfig
from jaxis.errors import CheckpointError, ConfigError
from jaxis.loading.checkpoint import Checkpoint
from tests.support import parity
from tests.support.hub_server import HubClient, HubServer
from tests.support.parity import Family, prompt

SIZES = {"dim": 64, "n_layers": 2, "hidden_dim": 96, "n_heads": 4, "n_kv_heads": 2, "vocab_size": 131}
SETTINGS = {"dtype": "float32", "kv_cache_memory": "8MiB", "max_num_batched_tokens": 64, "max_model_len": 256}
YARN = {"original_max_position_embeddings": 64, "factor": 4, "beta": 32, "alpha": 1, "apply_scale": False}
ROPE = {
    **{"rope_type": "yarn", "rope_theta": 5e5, "factor": 4.0, "original_max_position_embeddings": 64},
    **{"mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1},
}
MOE = {
    **{"num_experts": 8, "num_experts_per_tok": 3, "expert_hidden_dim": 40, "first_k_dense_replace": 1},
    **{"num_shared_experts": 1, "num_expert_groups": 1, "num_expert_groups_per_tok": 1, "routed_scale": 1.3},
    **{"route_every_n": 1, "expert_parallel": 1},
}
# params.json -> transformers' configuration of the same model.
MODELS = {
    "Mistral": (
        {**SIZES, "head_dim": 16, "norm_eps": 1e-5, "rope_theta": 1e6, "sliding_window": "11"},
        Family("", "MistralConfig", {"rms_norm_eps": 1e-5, "sliding_window": 11, "rope_theta": 1e6, "head_dim": 16}),
    ),
    "Ministral 8B": (
        {**SIZES, "head_dim": 24, "norm_eps": 1e-5, "rope_theta": 1e6, "_sliding_window": [None, 11]},
        Family(
            "",
            "MinistralConfig",
            {
                **{"rms_norm_eps": 1e-5, "sliding_window": 11, "rope_theta": 1e6, "head_dim": 24},
                "layer_types": ["full_attention", "sliding_attention"],
            },
        ),
    ),
    "Mixtral": (
        {
            **{**SIZES, "head_dim": 16, "norm_eps": 1e-5, "rope_theta": 1e6},
            "moe": {"num_experts": 4, "num_experts_per_tok": 2},
        },
        Family(
            "",
            "MixtralConfig",
            {"rms_norm_eps": 1e-5, "num_local_experts": 4, "num_experts_per_tok": 2, "rope_theta": 1e6},
        ),
    ),
    "Ministral 3": (
        {
            **{**SIZES, "head_dim": 32, "norm_eps": 1e-5, "rope_theta": 5e5, "tied_embeddings": True, "yarn": YARN},
            "llama_4_scaling": {"original_max_position_embeddings": 64, "beta": 0.1},
            "vision_encoder": {"hidden_size": 8},
        },
        Family(
            "",
            "Ministral3Config",
            {"rms_norm_eps": 1e-5, "tie_word_embeddings": True, "head_dim": 32, "rope_parameters": ROPE},
        ),
    ),
    "Mistral Large 3": (
        {
            **{**SIZES, "n_kv_heads": 4, "n_layers": 3, "norm_eps": 1e-6, "rope_theta": 5e5, "yarn": YARN, "moe": MOE},
            **{"q_lora_rank": 24, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16},
            "llama_4_scaling": {"original_max_position_embeddings": 64, "beta": 0.1},
        },
        Family(
            "",
            "Mistral4Config",
            {
                **{"num_hidden_layers": 3, "num_key_value_heads": 4, "rms_norm_eps": 1e-6, "rope_parameters": ROPE},
                **{"q_lora_rank": 24, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8},
                **{"v_head_dim": 16, "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 40},
                **{"first_k_dense_replace": 1, "n_shared_experts": 1, "routed_scaling_factor": 1.3},
                **{"n_group": 1, "topk_group": 1},
            },
        ),
    ),
}
NAMES = {
    **{"lm_head": "output", "model.norm": "norm", "model.embed_tokens": "tok_embeddings", "model.layers": "layers"},
    **{"input_layernorm": "attention_norm", "post_attention_layernorm": "ffn_norm"},
    **{"self_attn.kv_a_proj_with_mqa": "attention.wkv_a_with_mqa", "self_attn.kv_b_proj": "attention.wkv_b"},
    **{"self_attn.q_a_proj": "attention.wq_a", "self_attn.q_b_proj": "attention.wq_b"},
    **{"self_attn.q_a_layernorm": "attention.q_a_norm", "self_attn.kv_a_layernorm": "attention.kv_a_norm"},
    **{f"self_attn.{each}_proj": f"attention.w{each}" for each in "qkvo"},
    **{"mlp.gate.weight": "gate.weight", "mlp.experts": "experts", "mlp.shared_experts": "shared_experts"},
    **{"block_sparse_moe": "feed_forward", "mlp": "feed_forward"},
    **{"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"},
}


def write_folder(name, folder):
    """The tiny model of transformers in Mistral's format; returns its family."""
    params, family = MODELS[name]
    tensors = {}
    stored_tensors = load_file(Path(parity.checkpoint_folder(family), "model.safetensors"))
    for stored, tensor in (part for each in stored_tensors.items() for part in _experts(*each)):
        renamed = stored
        for theirs, mistrals in NAMES.items():
            renamed = renamed.replace(theirs, mistrals, 1)
        heads = {"wq": params["n_heads"], "wk": params["n_kv_heads"]}.get(renamed.split(".")[-2])
        if heads:
            # Row r of a half beside row r of the other.
            half = len(tensor) // heads // 2
            order = np.arange(len(tensor)).reshape(heads, 2, half).transpose(0, 2, 1).ravel()
            tensor = tensor[order]
        tensors[renamed] = np.ascontiguousarray(tensor)
    if "vision_encoder" in params:
        tensors["vision_encoder.patch_conv.weight"] = np.zeros((8, 3, 2, 2), np.float32)
    folder.mkdir(exist_ok=True)
    (folder / "params.json").write_text(json.dumps(params))
    split = len(tensors) // 2
    for i, part in enumerate((list(tensors)[:split], list(tensors)[split:]), 1):
        save_file({each: tensors[each] for each in part}, folder / f"consolidated-{i:05}-of-00002.safetensors")
    return family


def _experts(name, tensor):
    """The tensor, or of a stack of experts, each one's."""
    prefix, _, projection = name.rpartition(".")
    if tensor.ndim != 3:
        yield name, tensor
        return
    for i, each in enumerate(tensor):
        if projection == "down_proj":
            yield f"{prefix}.{i}.down_proj.weight", each
        else:
            for part, rows in zip(("gate_proj", "up_proj"), np.split(each, 2), strict=True):
                yield f"{prefix}.{i}.{part}.weight", rows


# Of one rope, and of the other.
QUICK = ("Ministral 3",)


@pytest.mark.parametrize(
    "name", [*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in MODELS if name not in QUICK)]
)
def test_logits_and_greedy_tokens_equal_transformers(name, tmp_path):
    family = write_folder(name, tmp_path)
    expected = parity.reference_run(family, 100)[0]
    greedy = parity.reference_greedy_tokens(family, prompt(17), 24)
    with LLM(str(tmp_path), **SETTINGS, show_progress=False) as llm:
        assert relative_error(llm.compute_logits(prompt(100), path="whole"), expected) < 1e-5
        assert relative_error(llm.compute_logits(prompt(100), path="paged"), expected) < 1e-5
        params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
        [output] = llm.generate([{"prompt_token_ids": prompt(17)}], params)
    assert output.outputs[0].token_ids == greedy
    analysis = analyze(tmp_path)
    assert (analysis.findings, analysis.not_checked) == ((), "")


def test_fp8_weights_stand_for_their_products_with_the_scale(tmp_path):
    """With a scale a tensor under Mistral's names, beside those of inputs, which are not used."""
    write_folder("Ministral 3", tmp_path / "plain")
    write_folder("Ministral 3", tmp_path / "fp8")
    params = json.loads((tmp_path / "fp8" / "params.json").read_text())
    params["quantization"] = {"qformat_weight": "fp8_e4m3", "qscheme_act": "TENSOR"}
    (tmp_path / "fp8" / "params.json").write_text(json.dumps(params))
    for path in sorted((tmp_path / "fp8").glob("consolidated*")):
        plain, stored = load_file(path), load_file(path)
        for name, tensor in plain.items():
            if (".attention.w" in name or ".feed_forward." in name) and not name.startswith("vision"):
                scale = np.float32(np.abs(tensor).max() / 400)
                stored[name] = (tensor / scale).astype(ml_dtypes.float8_e4m3fn)
                module = name.removesuffix("weight")
                stored |= {f"{module}qscale_weight": np.array(scale), f"{module}qscale_act": np.array(scale)}
                plain[name] = stored[name].astype(np.float32) * scale
        save_file(stored, path)
        save_file(plain, tmp_path / "plain" / path.name)
    found = []
    for folder in ("plain", "fp8"):
        with LLM(str(tmp_path / folder), **SETTINGS, show_progress=False) as llm:
            found.append(llm.compute_logits(prompt(40)))
    assert relative_error(found[1], found[0]) < 1e-5


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dim": None}, "has no 'dim', which the model needs"),
        ({"rope_theta": None}, "has no 'rope_theta', which the model needs"),
        ({"use_biases": True}, "has use_biases=True, and only False is supported"),
        ({"new_thing": 3}, r"has keys that are not known \(new_thing\): it is of a newer model"),
        ({"llama_4_scaling": {"beta": 0.1}}, "has llama_4_scaling without yarn"),
        ({"yarn": YARN, "llama_4_scaling": {"beta": 0.1}}, "different original_max_position_embeddings"),
        ({"yarn": {**YARN, "gamma": 1}}, r"keys that are not known \(gamma\)"),
        ({"sliding_window": [None, 3, 5]}, r"sliding_window=\[None, 3, 5\], expected one size or null in each"),
        (
            {"quantization": {"qformat_weight": "int3"}},
            "expected fp8_e4m3 or compressed-tensors",
        ),
        ({"multiple_of": 256}, "is Meta's: give the folder of a checkpoint in Hugging Face format"),
        ({"qk_nope_head_dim": 8, "q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 8, "v_head_dim": 8}, "yarn"),
    ],
)
def test_params_that_are_not_supported_are_one_line(changes, message, tmp_path):
    params = {**MODELS["Mistral"][0], **changes}
    (tmp_path / "params.json").write_text(json.dumps(params))
    with pytest.raises(ConfigError, match=message) as error:
        HFConfig.from_folder(tmp_path)
    assert "\n" not in str(error.value)


def test_verify_says_that_the_reference_does_not_read_it(tmp_path):
    (tmp_path / "params.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"in Mistral's own format, which transformers does not read"):
        find_source(str(tmp_path))


def test_a_missing_shard_is_named(tmp_path):
    write_folder("Mistral", tmp_path)
    (tmp_path / "consolidated-00002-of-00002.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"but not consolidated-00002-of-00002\.safetensors"):
        Checkpoint(tmp_path)


def test_of_a_repository_in_both_formats_only_one_is_downloaded(tmp_path):
    own = {"params.json": b"{}", "tekken.json": b"{}", "consolidated.safetensors": b"x", "README.md": b"x"}
    both = {**own, "config.json": b"{}", "model.safetensors": b"x"}
    server = HubServer({"org/own": {"main": own}, "org/both": {"main": both}})
    client = HubClient(tmp_path, HF_ENDPOINT=server.url)
    try:
        found = {
            name: {path.name for path in Path(client.resolve(f"org/{name}")["folder"]).iterdir()}
            for name in ("own", "both")
        }
    finally:
        client.close()
        server.close()
    assert found["own"] == own.keys() - {"README.md"}
    assert found["both"] == both.keys() - {"README.md", "consolidated.safetensors"}
