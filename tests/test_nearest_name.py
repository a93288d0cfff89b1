"""Names that are nearly right lead to the right ones."""

import dataclasses

import pytest

from jaxis.engine.arguments import EngineArgs
from jaxis.nearest_name import did_you_mean, nearest_name

ARGUMENTS = [field.name for field in dataclasses.fields(EngineArgs)]


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("max_length", "max_model_len"),
        ("max_len", "max_model_len"),
        ("n_ctx", "max_model_len"),
        ("context_length", "max_model_len"),
        ("Max_Model_Len", "max_model_len"),
        ("max-num-seqs", "max_num_seqs"),
        ("max_seqs", "max_num_seqs"),
        ("gpu_memory", "gpu_memory_utilization"),
        ("tensor_parallel", "tensor_parallel_size"),
        ("quantize", "quantization"),
        ("temperature", None),
        ("x" * 10_000, None),
        ("", None),
    ],
)
def test_a_misspelt_argument_leads_to_the_one_that_was_meant(name, meant):
    assert nearest_name(name, ARGUMENTS) == meant


@pytest.mark.parametrize(
    ("name", "known", "meant"),
    [
        ("fp16", ("float32", "bfloat16", "float16"), "float16"),
        ("bf16", ("float32", "bfloat16", "float16"), "bfloat16"),
        ("half", ("float32", "bfloat16", "float16"), "float16"),
        ("q4", ("none", "int8", "int4"), "int4"),
        ("w8a8", ("none", "int8", "int4"), "int8"),
        ("zzz", ("none", "int8", "int4"), None),
    ],
)
def test_other_systems_words_for_types_lead_to_ours(name, known, meant):
    assert nearest_name(name, known) == meant


def test_a_key_of_another_section_is_found_there():
    known = ["training.output_dir", "peft.peft_save_mode", "peft.lora_r"]
    assert nearest_name("training.peft_save_mode", known) == "peft.peft_save_mode"
    assert did_you_mean("peft.lora_R", known) == ": did you mean peft.lora_r?"
    assert did_you_mean("peft.colour", known) == ""
