"""A fault planted in a family is found, and the module that has it is named."""

import inspect
import re
from pathlib import Path

import pytest
from transformers.models.llama import modeling_llama

from tests.bringup.verify import faulty_models as faults
from tests.bringup.verify.verified_models import layers_of
from tests.support.quick_rows import quick_rows

# A published config, the layer and the fault in it, the module at fault, a part of what is said of it, and the cause
# that is named: None if none is.
PLANTED = [
    ("LLAMA_3_2", 1, faults.other_rope_pairing, "self_attn", "what it gives o_proj after v_proj", "rope_pairing"),
    ("LLAMA_3_2", 0, faults.rope_of_half_the_head, "self_attn", "what it gives o_proj", "layer_kind"),
    ("LLAMA_2", 1, faults.scale_of_the_hidden_size, "self_attn", "what it gives o_proj", "attention_scale"),
    ("LLAMA_2", 1, faults.norms_swapped, "", "what it gives post_attention_layernorm", "call_order"),
    ("LLAMA_2", 1, faults.norm_after_instead_of_before, "", "what it gives self_attn", "call_order"),
    ("LLAMA_2", 0, faults.no_residual_around_the_mlp, "", "its output", "residual"),
    ("LLAMA_2", 1, faults.weight_transposed, "self_attn.o_proj", "its output", "transposed"),
    ("LLAMA_2", 1, faults.gate_and_up_exchanged, "mlp", "what it gives down_proj", "gate_and_up"),
    ("LLAMA_2", 1, faults.other_activation, "mlp", "what it gives down_proj", "activation"),
    ("LLAMA_2", 1, faults.norm_with_one_added_to_its_weight, "post_attention_layernorm", "its output", "unit_offset"),
    ("LLAMA_2", 1, faults.rounded_to_bfloat16, "mlp.down_proj", "its output", "rounding"),
    ("MISTRAL", 1, faults.window_one_too_long, "self_attn", "what it gives o_proj", "window"),
    ("QWEN_3", 1, faults.head_norms_forgotten, "self_attn", "not called: q_norm, k_norm", "not_called"),
    ("QWEN_2_5", 1, faults.bias_forgotten, "self_attn.k_proj", "its output", "missing_bias"),
    ("deepseek-v3", 0, faults.other_rope_pairing, "self_attn", "what it gives o_proj", "rope_pairing"),
    (
        "deepseek-v3",
        0,
        faults.scale_without_that_of_the_context_extension,
        "self_attn",
        "what it gives o_proj",
        "layer_kind",
    ),
    ("deepseek-v3", 2, faults.selection_bias_forgotten, "mlp.gate", "its output", "expert_choice"),
    ("deepseek-v3", 2, faults.experts_of_all_groups, "mlp.gate", "its output", "routing"),
    ("deepseek-v3", 2, faults.scaling_factor_forgotten, "mlp.gate", "its output", "scale"),
    ("deepseek-v3", 2, faults.shared_experts_forgotten, "mlp", "not called: shared_experts", "not_called"),
    (
        "deepseek-v3",
        2,
        faults.shared_experts_gate_and_up_exchanged,
        "mlp.shared_experts",
        "what it gives down_proj",
        "gate_and_up",
    ),
    ("deepseek-v3", 2, faults.each_expert_exchanged_with_its_neighbour, "mlp.experts", "its output", None),
    ("deepseek-v3", 2, faults.two_experts_exchanged, "mlp.experts", "its output", "some_experts"),
    ("qwen3-30b-a3b", 0, faults.weights_not_renormalized, "mlp.gate", "its output", "routing"),
    ("gpt-oss-20b", 1, faults.sinks_forgotten, "self_attn", "what it gives o_proj", "factors"),
    ("gpt-oss-20b", 0, faults.window_one_too_long, "self_attn", "what it gives o_proj", "window"),
    ("llama-4-scout", 0, faults.chunk_one_too_long, "self_attn", "what it gives o_proj", "window"),
    ("llama-4-scout", 3, faults.temperature_forgotten, "self_attn", "what it gives o_proj", "from_position"),
]
# One of each kind of module, and of each way in which one can be found.
QUICK = (
    *(faults.norms_swapped, faults.no_residual_around_the_mlp, faults.weight_transposed, faults.other_activation),
    *(faults.window_one_too_long, faults.head_norms_forgotten),
)
PUBLISHED = list(dict.fromkeys(row[0] for row in PLANTED))
QUICK_PUBLISHED = ("LLAMA_2", "QWEN_3", "MISTRAL")


@pytest.mark.sampled(6)
@pytest.mark.parametrize(
    ("config", "layer", "plant", "module", "said", "cause"),
    quick_rows(PLANTED, [row for row in PLANTED if row[2] in QUICK and row[0] != "gpt-oss-20b"]),
    ids=[f"{config}-{plant.__name__}" for config, _, plant, *_ in PLANTED],
)
def test_the_module_at_fault_is_named(config, layer, plant, module, said, cause):
    check = layers_of(config, plant, layer)
    assert not check.passed
    assert check.divergence.module.endswith(f"model.layers.{layer}{module and '.'}{module}")
    assert said in str(check.divergence)
    assert check.divergence.own_error > 1e-4
    assert {found.code for found in check.divergence.causes} == ({cause} if cause else set())
    # Everything before it is right in the chain too.
    assert check.divergence.error_before is None or check.divergence.error_before < 1e-4
    assert check.divergence.error_after is None or check.divergence.error_after > 1e-4


@pytest.mark.parametrize(
    ("plant", "ours", "theirs"),
    [
        # A linear layer is torch's: the code is that of the module around it.
        (faults.weight_transposed, ("layers/grouped_query_attention.py", "__call__", "self.output("), "LlamaAttention"),
        (faults.no_residual_around_the_mlp, ("verify/faulty_models.py", "call", "mlp("), "LlamaDecoderLayer"),
    ],
)
def test_the_lines_of_the_code_at_fault_are_named(plant, ours, theirs):
    divergence = layers_of("LLAMA_2", plant, 1).divergence

    def read(place):
        path, first, last = re.fullmatch(r"(.+):(\d+)-(\d+)", place).groups()
        return path, "".join(Path(path).read_text().splitlines(keepends=True)[int(first) - 1 : int(last)])

    file, name, called = ours
    path, code = read(divergence.our_code[-1])
    assert path.endswith(file)
    assert f"def {name}(" in code.split(":\n")[0]
    assert called in code
    [place] = divergence.reference_code
    assert read(place)[1] == inspect.getsource(getattr(modeling_llama, theirs).forward)


@pytest.mark.slow
@pytest.mark.parametrize("config", quick_rows(PUBLISHED, QUICK_PUBLISHED))
def test_without_a_fault_every_module_is_right(config):
    check = layers_of(config)
    assert check.passed, str(check.divergence)
    assert check.unmatched == ()
    # The projection that latent attention absorbs.
    assert all(name.endswith("kv_b_proj") for name in check.not_called)
    not_compared = [module.name for module in check.modules if module.own_error is None]
    # Llama 4's reference repeats the experts' input.
    assert all(name.endswith("feed_forward.experts") for name in not_compared)
    assert max(module.output_error for module in check.modules if module.output_error is not None) < 5e-5


@pytest.mark.slow
@pytest.mark.parametrize("config", quick_rows(["mamba-130m", "MAMBA_2"], ["MAMBA_2"]))
def test_a_model_whose_layers_all_have_states_is_compared_too(config):
    check = layers_of(config)
    assert check.passed, str(check.divergence)
    assert check.num_compared == len(check.modules) > 0
    # The reference does not call its convolution.
    assert {name.rpartition(".")[2] for name in check.unmatched} == {"conv1d"}


@pytest.mark.slow
@pytest.mark.parametrize(
    "fault", quick_rows([faults.other_rope_pairing, faults.gate_and_up_exchanged], [faults.other_rope_pairing])
)
def test_in_bfloat16_too(fault):
    assert layers_of("LLAMA_3_2", dtype="bfloat16").passed
    check = layers_of("LLAMA_3_2", fault, dtype="bfloat16")
    assert check.divergence.module in ("model.layers.1.self_attn", "model.layers.1.mlp")
