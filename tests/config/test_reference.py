import importlib.util
import json

import pytest
import transformers

from jaxis.config.reference import keys_of_other_families, model_types_of, reference_of
from jaxis.models.registry import built_in_models
from tests.support.places import REPOSITORY

SPEC = importlib.util.spec_from_file_location("reference_keys", REPOSITORY / "tools" / "reference_keys.py")
TOOL = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(TOOL)
DATA = json.loads(TOOL.DATA.read_text("utf-8"))


@pytest.mark.slow  # imports every configuration of transformers
def test_the_file_is_what_the_tool_writes():
    if DATA["transformers"] != transformers.__version__:
        pytest.skip(f"the file is of transformers {DATA['transformers']}, and {transformers.__version__} is installed")
    assert TOOL.reference_keys() == DATA, "run python tools/reference_keys.py"


def test_every_built_in_architecture_has_a_model_type():
    without = {name for name in built_in_models() if not model_types_of(name)}
    # Which their makers' own code runs.
    assert without == {
        *("BailingMoeV2ForCausalLM", "BailingMoeV2_5ForCausalLM", "InternLM2ForCausalLM", "MiniCPMForCausalLM"),
        *("IQuestLoopCoderForCausalLM", "LongcatFlashNgramForCausalLM", "DeepseekV41ForConditionalGeneration"),
        *("KimiK3ForCausalLM", "KimiK3ForConditionalGeneration", "MiniMaxM3SparseForCausalLM"),
        *("Step5ForCausalLM", "Step5ForConditionalGeneration"),
    }


def test_a_default_is_what_the_reference_assumes():
    config = transformers.AutoConfig.for_model("starcoder2")
    for key in ("hidden_act", "norm_epsilon", "use_bias", "hidden_size", "tie_word_embeddings"):
        assert reference_of("starcoder2").defaults[key] == getattr(config, key)


@pytest.mark.parametrize(
    ("model_type", "read", "not_read"),
    [
        ("llama", ["hidden_act", "mlp_bias", "rope_theta", "layer_types", "per_layer_config"], ["n_group", "qkv_bias"]),
        ("qwen3_moe", ["decoder_sparse_step", "norm_topk_prob"], ["use_qk_norm", "shared_expert_intermediate_size"]),
        ("starcoder2", ["use_bias", "norm_epsilon"], ["activation_function", "layer_norm_epsilon"]),
        ("gemma3_text", ["sliding_window_pattern", "query_pre_attn_scalar"], ["logit_scale"]),
        ("gpt_oss", ["swiglu_limit", "num_experts"], ["norm_topk_prob"]),
    ],
)
def test_keys_that_are_known_to_be_read_or_not(model_type, read, not_read):
    keys = reference_of(model_type).defaults
    assert set(read) <= set(keys)
    assert set(not_read).isdisjoint(keys)
    assert {"unsloth_version", "to_dict", "get_text_config", "_attn_implementation"}.isdisjoint(keys)


def test_keys_of_other_families_are_settings_and_no_stamps():
    assert {"logit_scale", "alibi", "qkv_bias", "shared_expert_intermediate_size"} <= keys_of_other_families()
    assert {"unsloth_version", "is_llama_config", "auto_map", "to_dict"}.isdisjoint(keys_of_other_families())


def test_a_type_that_has_its_code_from_another():
    assert reference_of("kimi_k2") == reference_of("deepseek_v3")
    assert model_types_of("DeepseekV3ForCausalLM") == ("deepseek_v3", "kimi_k2")
    assert reference_of("never_heard_of") is reference_of(None) is reference_of(["llama"]) is None
