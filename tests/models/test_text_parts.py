"""Multimodal checkpoints as transformers saves them: their text part gives transformers' numbers, whole and paged."""

import json

import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from safetensors.numpy import load_file, save_file

from jaxis.bringup.analyze.analysis import analyze
from jaxis.bringup.verify.compare import GATES, relative_error
from jaxis.config import ModelConfig, VllmConfig
from jaxis.config.hf_config import HFConfig
from jaxis.errors import CheckpointError, ConfigError
from jaxis.models.model_loader import construct_abstractly, load_model
from jaxis.models.tied_tables import config_as_stored
from jaxis.parallel.mesh import make_mesh
from tests.support.paged_sequences import PagedSequence, PagedSequences
from tests.support.parity import prompt, run_model
from tests.support.quick_rows import quick_rows

TEXT = {
    **{"vocab_size": 131, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4},
    **{"num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512, "pad_token_id": 0},
}
_PIXTRAL = {
    **{"model_type": "pixtral", "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "head_dim": 8},
    **{"num_attention_heads": 2, "image_size": 28, "patch_size": 14},
}
_YARN = {
    **{"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 16},
    **{"beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0},
}


def _mistral3(text: dict) -> transformers.PretrainedConfig:
    return transformers.Mistral3Config(text_config=TEXT | text, vision_config=_PIXTRAL, tie_word_embeddings=False)


_QWEN_VISION = {
    **{"depth": 1, "hidden_size": 16, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 64, "patch_size": 4},
    **{"spatial_merge_size": 2},
}
_QWEN3_VISION = _QWEN_VISION | {"deepstack_visual_indexes": [0], "num_position_embeddings": 16}
_MROPE = {"rope_type": "default", "rope_theta": 5e6, "mrope_section": [4, 2, 2]}
_EXPERTS = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 40, "mlp_only_layers": [0]}
# In the makers' words: a layer of each kind that is dense, sparse and clamped, and entries of one that predicts.
STEP = {
    **{"model_type": "step3p5", "num_hidden_layers": 4, "num_nextn_predict_layers": 1, "num_attention_groups": 2},
    **{"moe_num_experts": 6, "moe_top_k": 3, "moe_intermediate_size": 40, "share_expert_dim": 48},
    **{"moe_layers_enum": "1,2,3", "moe_router_scaling_factor": 1.6, "sliding_window": 11},
    **{"swiglu_limits": [0, 0, None, 0.4, 7], "swiglu_limits_shared": [0.5, 0, 0, 0.3, 7]},
    "layer_types": ["full_attention", "sliding_attention", "sliding_attention", "full_attention", "full_attention"],
    "attention_other_setting": {"attention_type": "sliding_attention", "num_attention_heads": 6},
    "rope_theta": [5e6, 1e4, 1e4, 5e6, 5e6],
    "partial_rotary_factors": [0.5, 1.0, 1.0, 0.5, 0.5],
    "rope_scaling": {
        **{"rope_type": "llama3", "factor": 2.0, "low_freq_factor": 1.0, "high_freq_factor": 32.0},
        "original_max_position_embeddings": 32,
    },
    "yarn_only_types": ["full_attention"],
}
_STEP_VISION = {
    **{"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 56, "mlp_ratio": 2.0},
    "max_position_embeddings": 16,
}


CONFIGS = {
    "Mistral Small 3.1": lambda: _mistral3({"model_type": "mistral", "sliding_window": None}),
    "Ministral 3": lambda: _mistral3(
        {"model_type": "ministral3", "rope_parameters": _YARN | {"llama_4_scaling_beta": 0.5}}
    ),
    "Mistral Small 4": lambda: _mistral3(
        {
            **{"model_type": "mistral4", "num_key_value_heads": 4, "kv_lora_rank": 32, "q_lora_rank": 24},
            **{"qk_nope_head_dim": 24, "qk_rope_head_dim": 8, "v_head_dim": 20, "moe_intermediate_size": 40},
            **{"n_routed_experts": 6, "num_experts_per_tok": 3, "head_dim": 32},
            "rope_parameters": _YARN | {"llama_4_scaling_beta": 0.5, "partial_rotary_factor": 0.25},
        }
    ),
    "Step 3.7": lambda: transformers.Step3p7Config(text_config=TEXT | STEP, vision_config=_STEP_VISION),
    "Qwen2.5-VL": lambda: transformers.Qwen2_5_VLConfig(
        text_config=TEXT | {"rope_parameters": _MROPE}, vision_config=_QWEN_VISION
    ),
    "Qwen3-VL": lambda: transformers.Qwen3VLConfig(
        text_config=TEXT | {"rope_parameters": _MROPE | {"mrope_interleaved": True}, "tie_word_embeddings": True},
        vision_config=_QWEN3_VISION,
        tie_word_embeddings=True,
    ),
    "Qwen3-VL MoE, saved by transformers 5": lambda: transformers.Qwen3VLMoeConfig(
        text_config=TEXT | _EXPERTS | {"rope_parameters": _MROPE, "tie_word_embeddings": False},
        vision_config=_QWEN3_VISION,
    ),
    "Muse Glimmer": lambda: transformers.MuseGlimmerConfig(
        text_config=TEXT | {"num_hidden_layers": 4, "sliding_window": 11, "attention_bias": True, "rms_norm_eps": 1e-3},
        vision_config={
            **{"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2},
            **{"pos_emb_height": 4, "pos_emb_width": 4},
        },
        out_hidden_size=64,
        projector_hidden_size=16,
    ),
}
"""Name -> the config of a tiny multimodal checkpoint."""
CONFIGS["Qwen3-VL MoE"] = CONFIGS["Qwen3-VL MoE, saved by transformers 5"]
# Whose published files have stacks of experts that transformers transposes.
TRANSPOSED = ("Qwen3-VL MoE",)
# Their text is a family's own, under names that others of these have.
SLOW = {"Mistral Small 4", "Step 3.7", "Ministral 3", "Qwen3-VL", "Qwen3-VL MoE, saved by transformers 5"}


@pytest.fixture(scope="module", params=quick_rows(CONFIGS, CONFIGS.keys() - SLOW))
def checkpoint(request, tmp_path_factory):
    """The reference, with every parameter random, and its folder."""
    torch.manual_seed(0)
    config = CONFIGS[request.param]()
    model = transformers.AutoModelForImageTextToText.from_config(config, attn_implementation="eager").float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(("norm" in name) + 0.2 * torch.randn_like(parameter))
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(0.2 * torch.randn_like(buffer))
    folder = tmp_path_factory.mktemp("checkpoint")
    model.save_pretrained(folder)
    if request.param in TRANSPOSED:
        path = folder / "model.safetensors"
        save_file(
            {name: tensor.mT.copy() if ".experts." in name else tensor for name, tensor in load_file(path).items()},
            path,
        )
    return model, folder


@pytest.mark.sampled(6)
def test_text_is_that_of_the_reference(checkpoint):
    reference, folder = checkpoint
    tokens = prompt(100)
    with torch.no_grad():
        expected = reference(torch.tensor([tokens])).logits[0].numpy()
    model = load_model(
        VllmConfig(ModelConfig(str(folder), HFConfig.from_folder(folder), dtype=jnp.float32)), make_mesh()
    )
    whole = run_model(model, (100,))[100][0]
    paged, sequence = PagedSequences(model, dtype=jnp.float32), PagedSequence()
    chunks = [paged.step([(sequence, tokens[i : i + 37])], pad_tokens=40, pad_requests=2)[0] for i in (0, 37, 74)]
    for logits in (whole, np.concatenate(chunks)):
        assert relative_error(logits, expected) < GATES["float32"].relative_error


@pytest.mark.sampled(3)
def test_everything_in_the_checkpoint_is_known(checkpoint):
    _, folder = checkpoint
    analysis = analyze(str(folder))
    assert (analysis.findings, analysis.not_checked) == ((), "")
    assert "text_config" in json.loads((folder / "config.json").read_text())


def test_qwen2_5_vl_may_have_its_texts_keys_outside():
    """It was published so: without `text_config`."""
    nested = {"architectures": ["Qwen2_5_VLForConditionalGeneration"], "model_type": "qwen2_5_vl", "vision_config": {}}
    text = TEXT | {"rms_norm_eps": 1e-6, "rope_scaling": {"type": "mrope", "mrope_section": [4, 2, 2]}}
    text |= {"rope_theta": 1e6, "use_sliding_window": False, "sliding_window": 32768, "max_window_layers": 2}
    flat = HFConfig(nested | text)
    construct_abstractly(VllmConfig(ModelConfig("flat", flat)))
    assert flat.unread_keys() == []


def test_another_model_type_of_the_text_is_refused():
    values = {"architectures": ["Mistral3ForConditionalGeneration"], "text_config": TEXT | {"model_type": "gemma"}}
    with pytest.raises(ConfigError, match="has model_type='gemma', expected 'mistral' or"):
        construct_abstractly(VllmConfig(ModelConfig("other", HFConfig(values))))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("family", ["Llava", "Mistral3"])
@pytest.mark.parametrize(
    ("outside", "inside", "table"),
    [(True, False, "one"), (None, False, "one"), (True, False, "two"), (False, True, "two"), (None, True, "two")],
)
def test_configs_that_contradict_themselves_are_read_as_the_reference_reads_them(
    tmp_path, family, outside, inside, table
):
    torch.manual_seed(0)
    kinds = {"Llava": ("llama", "clip_vision_model"), "Mistral3": ("mistral", "pixtral")}
    text, sight = ({"model_type": kind} for kind in kinds[family])
    config = getattr(transformers, f"{family}Config")(
        text_config=TEXT | text | {"tie_word_embeddings": False}, vision_config=_PIXTRAL | sight
    )
    config.tie_word_embeddings = False
    transformers.AutoModelForImageTextToText.from_config(config).save_pretrained(tmp_path)
    values = json.loads((tmp_path / "config.json").read_text())
    values["text_config"]["tie_word_embeddings"] = inside
    values["tie_word_embeddings"] = outside
    (tmp_path / "config.json").write_text(json.dumps({k: v for k, v in values.items() if v is not None}))
    path = tmp_path / "model.safetensors"
    if table == "one":
        save_file({name: t for name, t in load_file(path).items() if "lm_head" not in name}, path, {"format": "pt"})
    reference, info = transformers.AutoModelForImageTextToText.from_pretrained(
        tmp_path, dtype=torch.float32, output_loading_info=True
    )
    tokens, config = prompt(40), config_as_stored(tmp_path)
    vllm_config = VllmConfig(ModelConfig(str(tmp_path), config, dtype=jnp.float32))
    if info["missing_keys"]:  # the reference's head is random
        with pytest.raises(CheckpointError, match=r"lm_head\.weight"):
            load_model(vllm_config, make_mesh())
        return
    with torch.no_grad():
        expected = reference.eval()(torch.tensor([tokens])).logits[0].numpy()
    logits = run_model(load_model(vllm_config, make_mesh()), (40,))[40][0]
    assert relative_error(logits, expected) < 1e-4
