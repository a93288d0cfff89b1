"""Checkpoints quantized by GPTQ: whole models, compared with transformers on the weights that they stand for."""

import json

import numpy as np
import pytest
from safetensors.torch import load_file

from jaxis.config.hf_config import HFConfig
from jaxis.errors import CheckpointError, ConfigError
from jaxis.kernels.weights import CodedWeight, PackedWeight, QuantizedWeight, ReorderedWeight
from jaxis.quantization.checkpoint_formats import quantization_of_checkpoint
from tests.quantization.packed_integers import gptq_tensors, quantize, write
from tests.support.block_checkpoints import assert_logits, replace_tensors, write_model
from tests.support.dequantized import dequantize
from tests.support.quantized_models import assert_equal, load, logits, values
from tests.support.quick_rows import quick_rows
from tests.support.tiny_checkpoints import write_checkpoint

GPTQ = {
    "quant_method": "gptq",
    "bits": 4,
    "group_size": 32,
    "desc_act": False,
    "sym": True,
    "static_groups": False,
    "damp_percent": 0.1,
    "true_sequential": True,
    "checkpoint_format": "gptq",
    "model_name_or_path": None,
    "lm_head": False,
    "meta": {"quantizer": ["gptqmodel:1.0"]},
    "pack_dtype": "int32",
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True}


def is_projection(module):
    return module.endswith("_proj")


def packs(version=1, where=is_projection, has_order=True, **how):
    """A `pack` for `write` that quantizes these modules."""

    def pack(module, weight):
        if not where(module):
            return None
        integers = quantize(weight, **how)
        return gptq_tensors(integers, version=version, has_order=has_order), integers.wide

    return pack


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    folder = tmp_path_factory.mktemp("source") / "qwen2"
    return write_checkpoint(folder, "qwen2", tokenizer=False, tie_word_embeddings=False)


@pytest.fixture(scope="module")
def packed(source, tmp_path_factory):
    return write(tmp_path_factory.mktemp("packed"), source, packs(), GPTQ)[0]


@pytest.fixture(scope="module")
def moe(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("source") / "moe", "qwen3_moe", tokenizer=False, **EXPERTS)


def assert_weights(model, wide):
    """The elements of each weight are bit-identical."""
    expected = load_file(wide / "model.safetensors")
    for name, weight in values(model).items():
        if name in expected:
            np.testing.assert_array_equal(dequantize(weight), expected[name].float().numpy(), err_msg=name)
        else:  # a stack of experts
            prefix, _, stack = name.rpartition(".")
            for expert, matrix in enumerate(np.asarray(dequantize(weight))):
                np.testing.assert_array_equal(matrix, expected[f"{prefix}.{expert}.{stack}.weight"].numpy())


CASES = {
    "4 bits": ({}, {}),
    "asymmetric": ({"sym": False}, {"symmetric": False}),
    "version 2": ({"sym": False, "checkpoint_format": "gptq_v2"}, {"symmetric": False, "version": 2}),
    "8 bits": ({"bits": 8}, {"bits": 8}),
    "8 bits asymmetric": ({"bits": 8, "sym": False}, {"bits": 8, "symmetric": False}),
    "3 bits": ({"bits": 3}, {"bits": 3}),
    "2 bits asymmetric": ({"bits": 2, "sym": False}, {"bits": 2, "symmetric": False}),
    "act-order": ({"desc_act": True}, {"reorders": True}),
    "act-order asymmetric": ({"desc_act": True, "sym": False}, {"reorders": True, "symmetric": False}),
    "one group a row": ({"group_size": -1}, {"group_size": -1, "has_order": False}),
    "act-order, one group a row": ({"group_size": -1, "desc_act": True}, {"group_size": -1}),
}


@pytest.mark.sampled
@pytest.mark.parametrize("case", quick_rows(CASES, ["asymmetric", "act-order"]))
def test_logits_are_those_of_the_weights_that_the_integers_stand_for(source, tmp_path, case):
    config, how = CASES[case]
    packed, wide = write(tmp_path, source, packs(**how), GPTQ | config)
    assert_weights(assert_logits(packed, wide), wide)
    assert_equal(load(packed, "dequantize"), load(wide))
    assert_equal(load(packed, "dequantize", native=True), load(wide, native=True))


@pytest.mark.slow
def test_experts_too(moe, tmp_path):
    packed, wide = write(tmp_path, moe, packs(symmetric=False), GPTQ | {"sym": False})
    assert_weights(assert_logits(packed, wide), wide)
    stack = values(load(packed, native=True))["model.layers.0.mlp.experts.gate_proj"]
    assert isinstance(stack, PackedWeight)
    assert_equal(load(packed, "dequantize", native=True), load(wide, native=True))


@pytest.mark.slow
def test_experts_of_mixed_bits_and_a_quantized_router(moe, tmp_path):
    def pack(module, weight):
        if module.endswith("mlp.gate"):
            return packs(where=lambda _: True, bits=8)(module, weight)
        return packs(bits=8 if module.endswith("down_proj") else 4)(module, weight)

    dynamic = {"+:.*down_proj": {"bits": 8}, "+:.*mlp.gate$": {"bits": 8}}
    packed, wide = write(tmp_path, moe, pack, GPTQ | {"dynamic": dynamic})
    assert_weights(assert_logits(packed, wide), wide)


@pytest.mark.slow
def test_fused_projections_are_as_in_the_file(tmp_path):
    import transformers

    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes |= {"num_key_value_heads": 2, "vocab_size": 512, "max_position_embeddings": 64}
    config = transformers.Phi3Config(**sizes, bos_token_id=None, eos_token_id=None, pad_token_id=None)
    packed, wide = write(
        tmp_path, write_model(tmp_path / "source", config), packs(reorders=True), GPTQ | {"desc_act": True}
    )
    assert isinstance(values(load(packed))["model.layers.0.self_attn.qkv_proj.weight"], ReorderedWeight)
    assert_logits(packed, wide)


@pytest.mark.slow
def test_modules_are_quantized_as_their_tensors_say_whatever_config_json_says(source, tmp_path):
    def pack(module, weight):
        if module.endswith(("v_proj", "0.mlp.down_proj")):
            return None
        if module == "lm_head" or module.endswith("o_proj"):
            return packs(where=lambda _: True, bits=8, group_size=-1)(module, weight)
        return packs(bits=3 if module.endswith("k_proj") else 4)(module, weight)

    packed, wide = write(tmp_path, source, pack, GPTQ | {"dynamic": {"-:.*q_proj": {}}})
    held = values(load(packed))
    kinds = {"q_proj": QuantizedWeight, "k_proj": CodedWeight, "o_proj": QuantizedWeight}
    for name, kind in kinds.items():
        assert isinstance(held[f"model.layers.1.self_attn.{name}.weight"], kind), name
    assert held["lm_head.weight"].qtype == "int8"
    assert not isinstance(held["model.layers.0.mlp.down_proj.weight"], QuantizedWeight)
    assert_weights(assert_logits(packed, wide), wide)


def test_symmetry_of_modules_follows_the_first_rule_that_matches(source, tmp_path):
    def pack(module, weight):
        return packs(symmetric=not module.endswith("up_proj"))(module, weight)

    rules = {"+:.*\\.up_proj": {"sym": False}, ".*up_.*": {"sym": True}}
    packed, wide = write(tmp_path, source, pack, GPTQ | {"dynamic": rules})
    assert_weights(load(packed), wide)
    packed, _ = write(tmp_path / "other", source, pack, GPTQ)
    message = "0.mlp.up_proj has a weight whose zero points are not all 8, although `sym`"
    with pytest.raises(CheckpointError, match=message):
        load(packed)


@pytest.mark.slow
def test_biases_of_zeros_that_the_model_lacks_are_left_out(source, moe, tmp_path):
    def pack(module, weight):
        made = packs()(module, weight)
        # The family has biases of its own only for q, k and v.
        if made is not None and not module.endswith(("q_proj", "k_proj", "v_proj")):
            made[0]["bias"] = np.zeros(len(weight), np.float16)
        return made

    packed, wide = write(tmp_path / "dense", source, pack, GPTQ)
    assert_logits(packed, wide)
    stored = load_file(packed / "model.safetensors")
    stored["model.layers.0.mlp.up_proj.bias"][5] = 0.5
    changed = replace_tensors(tmp_path / "changed", packed, stored)
    with pytest.raises(CheckpointError, match=r"up_proj.bias' has no parameter in the model, and is not zero"):
        load(changed)
    packed, wide = write(tmp_path / "moe", moe, pack, GPTQ)
    assert_weights(load(packed), wide)


def change(folder, packed, **tensors):
    stored = load_file(packed / "model.safetensors")
    for name, function in tensors.items():
        full_name = f"model.layers.0.mlp.up_proj.{name}"
        stored[full_name] = None if function is None else function(stored[full_name]).contiguous()
    return replace_tensors(folder, packed, {name: tensor for name, tensor in stored.items() if tensor is not None})


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"scales": None}, "1 of the model's parameters are not in the checkpoint: model.layers.0.mlp.up_proj.scales"),
        ({"scales": lambda t: t[:, :-1]}, r"up_proj.scales' has shape \[2, 95\] in the checkpoint, \[2, 96\] in the"),
        ({"qweight": lambda t: t[:-1]}, r"up_proj.qweight' has shape \[7, 96\] in the checkpoint, \[8, 96\] in the"),
        ({"qzeros": lambda t: t.short()}, "up_proj.qzeros' is int16 in the checkpoint, but must be int32 here"),
        ({"qzeros": lambda t: t + 1}, "up_proj has a weight whose zero points are not all 8, although `sym`"),
        ({"g_idx": lambda t: t + 1}, "up_proj has a weight whose g_idx has groups from 1 to 2, but there are 2"),
        ({"scales": lambda t: t / 0}, "up_proj has a weight whose scales are not all finite"),
        ({"g_idx": lambda t: t[:-2]}, r"up_proj.g_idx' has shape \[62\] in the checkpoint, \[64\] in the model"),
        ({"scales": lambda t: t[0, 0]}, r"up_proj.scales' has shape \[\] in the checkpoint, \[2, 96\] in the model"),
        ({"qweight": lambda t: t[0, 0]}, r"up_proj.qweight' has shape \[\] in the checkpoint, \[8, 96\] in the model"),
    ],
)
def test_tensors_that_do_not_fit_are_named(packed, tmp_path, tensors, message):
    with pytest.raises(CheckpointError, match=message):
        load(change(tmp_path / "changed", packed, **tensors))


def test_without_the_order_of_its_columns_a_reordered_weight_is_refused(source, tmp_path):
    packed, _ = write(tmp_path, source, packs(reorders=True), GPTQ | {"desc_act": True})
    folder = change(tmp_path / "changed", packed, g_idx=None)
    with pytest.raises(ConfigError, match=r"says desc_act, but the checkpoint has no model.layers.0.mlp.up_proj.g_idx"):
        load(folder)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"bits": 5}, "bits=5 is not supported; supported: 2, 3, 4, 8"),
        ({"bits": "4"}, "bits='4' is not supported"),
        ({"bits": None}, "bits=None is not supported"),
        ({"group_size": 0}, "group_size=0 is not supported; supported: a number of features, or -1"),
        ({"sym": "yes"}, "sym='yes' must be true or false"),
        *(
            ({"checkpoint_format": name}, f"checkpoint_format='{name}' is laid out for other kernels and is not read")
            for name in ("marlin", "bitblas", "gptq_p", "qqq", "exl3")
        ),
        ({"is_marlin_format": True}, "checkpoint_format='marlin' is laid out for other kernels"),
        ({"checkpoint_format": ["gptq"]}, "checkpoint_format="),
        ({"pack_dtype": "int16"}, "pack_dtype='int16' is not supported; supported: 'int32'"),
        ({"data_type": "nv_fp"}, "data_type='nv_fp' is not supported; supported: 'int'"),
        ({"rotation": "hadamard"}, "has the key 'rotation', which is not supported"),
        ({"adapter": {"rank": 8}}, "has the key 'adapter', which is not supported"),
        ({"act_bits": 8}, "act_bits=8 is not supported"),
        ({"dynamic": {"+:(": {}}}, r"dynamic: \+:\( is not a regular expression"),
        ({"dynamic": {"a": 4}}, "dynamic: a is 4, expected an object"),
        ({"dynamic": {"a": {"bits": 7}}}, "dynamic: a: bits=7 is not supported"),
        ({"dynamic": [1]}, r"dynamic=\[1\] must be an object"),
        ({"modules_in_block_to_quantize": [[1]]}, "modules_in_block_to_quantize=.* must be lists of names"),
        ({"modules_in_block_to_quantize": 7}, "modules_in_block_to_quantize=7 must be lists of names"),
    ],
)
def test_what_is_not_implemented_is_refused_by_name(config, message):
    with pytest.raises(ConfigError, match=message):
        quantization_of_checkpoint(HFConfig({"quantization_config": GPTQ | config}), None)


def test_config_json_alone_says_which_modules_are_quantized():
    config = GPTQ | {
        "modules_in_block_to_quantize": [["self_attn.q_proj", "mlp.up_proj"], ["self_attn.o_proj"]],
        "dynamic": {"-:.*layers.1.": {}, "+:.*o_proj": {"bits": 8}},
    }
    format_of = quantization_of_checkpoint(HFConfig({"quantization_config": config}), None).format_of
    assert format_of("model.layers.0.self_attn.q_proj", (64, 64)).bits == 4
    assert format_of("model.layers.0.self_attn.o_proj", (64, 64)).bits == 8
    for name in ("model.layers.1.self_attn.q_proj", "model.layers.0.mlp.down_proj", "lm_head", "model.embed_tokens"):
        assert format_of(name, (64, 64)) is None, name
    with_head = quantization_of_checkpoint(HFConfig({"quantization_config": GPTQ | {"lm_head": True}}), None)
    assert with_head.format_of("lm_head", (64, 64)).bits == 4


def test_an_analysis_finds_that_it_can_run(source, tmp_path):
    from jaxis.bringup.analyze.analysis import analyze

    packed, _ = write(tmp_path, source, packs(reorders=True), GPTQ | {"desc_act": True})
    analysis = analyze(str(packed), memory="1GiB")
    assert (analysis.findings, analysis.not_checked) == ((), "")
    config = json.loads((packed / "config.json").read_text())
    (packed / "config.json").unlink()
    (packed / "config.json").write_text(json.dumps(config | {"quantization_config": GPTQ | {"adapter": {"rank": 1}}}))
    assert any("adapter" in finding.sentence for finding in analyze(str(packed), memory="1GiB").findings)


@pytest.mark.sampled
@pytest.mark.parametrize("method", ["gptq", "awq", "auto-round"])
def test_plain_weights_under_a_config_that_says_they_are_quantized_load_and_it_is_said(
    source, tmp_path, method, caplog
):
    stored = {"quant_method": method, "bits": 4, "group_size": 32}
    plain = load_file(source / "model.safetensors")
    folder = replace_tensors(tmp_path / "plain", source, plain, quantization_config=stored)
    np.testing.assert_array_equal(logits(load(folder)), logits(load(source)))
    assert caplog.messages == [
        f"config.json says {method}, but the weights are not quantized: they are loaded as they are"
    ]
    np.testing.assert_array_equal(logits(load(folder, "int8")), logits(load(source, "int8")))
