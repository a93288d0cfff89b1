"""A fault planted in a family is found, and the module that has it is named."""

import faulty_models as faults
import pytest
from faulty_models import faulty
from verified_models import layers_of

# A published config, the fault, the module at fault and a part of what is said of it.
PLANTED = [
    ("LLAMA_3_2", faults.other_rope_pairing, "self_attn", "what it gives o_proj after v_proj"),
    ("LLAMA_3_2", faults.rope_of_half_the_head, "self_attn", "what it gives o_proj"),
    ("LLAMA_2", faults.scale_of_the_hidden_size, "self_attn", "what it gives o_proj"),
    ("LLAMA_2", faults.norms_swapped, "", "what it gives post_attention_layernorm"),
    ("LLAMA_2", faults.norm_after_instead_of_before, "", "what it gives self_attn"),
    ("LLAMA_2", faults.no_residual_around_the_mlp, "", "its output"),
    ("LLAMA_2", faults.weight_transposed, "self_attn.o_proj", "its output"),
    ("LLAMA_2", faults.gate_and_up_exchanged, "mlp", "what it gives down_proj"),
    ("LLAMA_2", faults.other_activation, "mlp", "what it gives down_proj"),
    ("LLAMA_2", faults.norm_with_one_added_to_its_weight, "post_attention_layernorm", "its output"),
    ("LLAMA_2", faults.rounded_to_bfloat16, "mlp.down_proj", "its output"),
    ("MISTRAL", faults.window_one_too_long, "self_attn", "what it gives o_proj"),
    ("QWEN_3", faults.head_norms_forgotten, "self_attn", "not called: q_norm, k_norm"),
    ("QWEN_2_5", faults.bias_forgotten, "self_attn.k_proj", "its output"),
]
ARCHITECTURES = {
    "LLAMA_2": "LlamaForCausalLM",
    "LLAMA_3_2": "LlamaForCausalLM",
    "MISTRAL": "MistralForCausalLM",
    "QWEN_2_5": "Qwen2ForCausalLM",
    "QWEN_3": "Qwen3ForCausalLM",
}


@pytest.mark.parametrize(
    ("config", "plant", "module", "said"), PLANTED, ids=[f"{row[0]}-{row[1].__name__}" for row in PLANTED]
)
def test_the_module_at_fault_is_named(config, plant, module, said):
    check = layers_of(config, faulty(ARCHITECTURES[config], plant))
    assert not check.passed
    assert check.divergence.module == f"model.layers.1{module and '.'}{module}"
    assert said in str(check.divergence)
    assert check.divergence.own_error > 1e-4
    # Everything before it is right in the chain too.
    assert check.divergence.error_before is None or check.divergence.error_before < 1e-4
    assert check.divergence.error_after > 1e-4


@pytest.mark.parametrize("config", sorted(ARCHITECTURES))
def test_without_a_fault_every_module_is_right(config):
    check = layers_of(config)
    assert check.passed, str(check.divergence)
    assert check.unmatched == check.not_called == ()
    assert all(module.own_error is not None for module in check.modules if module.name != "model.embed_tokens")
    assert max(module.output_error for module in check.modules) < 1e-5


@pytest.mark.parametrize("fault", [faults.other_rope_pairing, faults.gate_and_up_exchanged])
def test_in_bfloat16_too(fault):
    assert layers_of("LLAMA_3_2", dtype="bfloat16").passed
    check = layers_of("LLAMA_3_2", faulty("LlamaForCausalLM", fault), dtype="bfloat16")
    assert check.divergence.module in ("model.layers.1.self_attn", "model.layers.1.mlp")
