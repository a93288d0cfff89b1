"""Kimi Linear and K3, Ling 3, OLMo Hybrid: states, Ling's bounded units, kinds of layers, names, what is refused."""

from __future__ import annotations

import copy
import dataclasses
import json
import re
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from safetensors.numpy import load_file, save_file

from jaxis.bringup.verify.compare import relative_error
from jaxis.config import ModelConfig, VllmConfig
from jaxis.config.hf_config import HFConfig
from jaxis.errors import ConfigError
from jaxis.layers.delta_attention import DeltaAttention
from jaxis.models.model_loader import construct_abstractly, load_model
from jaxis.parallel.mesh import make_mesh
from tests.support import parity
from tests.support.paged_sequences import PagedSequence
from tests.support.places import TESTS

FAMILIES = {family.name: family for family in parity.FAMILIES}


def published(name, **changes):
    return json.loads((TESTS / "data" / "configs" / f"{name}.json").read_text()) | changes


def construct(values):
    config = ModelConfig("", HFConfig(values), dtype=jnp.bfloat16, max_model_len=2048)
    return construct_abstractly(VllmConfig(config))


@pytest.mark.sampled
@pytest.mark.parametrize("name", ["Kimi Linear", "Ling 3", "OLMo Hybrid"])
def test_the_states_of_a_slot_are_those_of_the_references_cache(name):
    family, tokens = FAMILIES[name], parity.prompt(29)
    model = parity.reference_model(family)
    cache = transformers.DynamicCache(config=model.config)
    with torch.no_grad():
        model(torch.tensor([tokens]), past_key_values=cache, use_cache=True)
    paged, sequence = parity.paged_sequences(family), PagedSequence()
    for chunk in (tokens[:13], tokens[13:14], tokens[14:]):
        paged.step([(sequence, chunk)], **parity.PADDING)
    linear = [i for i, kind in enumerate(model.config.layer_types) if kind == "linear_attention"]
    assert len(linear) == 2
    for i in linear:
        *inputs, recurrent = (np.asarray(array[sequence.read_slot]) for array in paged.caches[i])
        expected = cache.get_conv_state(i)[0].numpy().T[-len(inputs[0]) :]
        assert relative_error(np.concatenate(inputs, axis=-1), expected) < 1e-5
        assert relative_error(recurrent, cache.get_recurrent_state(i)[0].numpy()) < 1e-5


LIMIT = 0.05


def bounded(gate, up):
    return torch.nn.functional.silu(gate).clamp(max=LIMIT) * up.clamp(-LIMIT, LIMIT)


def bound_experts(experts):
    def forward(hidden, chosen, weights):
        out = torch.zeros_like(hidden)
        for expert, (into, out_of) in enumerate(zip(experts.gate_up_proj, experts.down_proj, strict=True)):
            weight = (weights * (chosen == expert)).sum(dim=-1, keepdim=True)
            out += weight * (bounded(*(hidden @ into.T).chunk(2, dim=-1)) @ out_of.T)
        return out

    experts.forward = forward


def bound_shared(mlp):
    mlp.forward = lambda hidden: mlp.down_proj(bounded(mlp.gate_proj(hidden), mlp.up_proj(hidden)))


@pytest.mark.slow
def test_lings_limits_bound_gates_and_ups_of_the_layers_that_have_them():
    """transformers ignores the limits; the definition is that of the makers' own branch of vLLM."""
    limits = {
        "expert_swiglu_limit_list": [LIMIT, 0, LIMIT, 0],
        "share_expert_swiglu_limit_list": [0, None, 0, LIMIT],
    }
    family = dataclasses.replace(FAMILIES["Ling 3"], name="Ling 3, bounded", config=FAMILIES["Ling 3"].config | limits)
    model = copy.deepcopy(parity.reference_model(family))
    unbounded = parity.reference_run(family, 17)[0]
    bound_experts(model.model.layers[2].mlp.experts)
    bound_shared(model.model.layers[3].mlp.shared_experts)
    with torch.no_grad():
        expected = model(torch.tensor([parity.prompt(17)]), use_cache=False).logits[0].numpy()
    assert relative_error(unbounded, expected) > 1e-2
    ours = parity.run_model(parity.loaded_model(family), (17,))[17][0]
    assert relative_error(ours, expected) < 1e-5


def test_kimis_lists_count_layers_from_one():
    layers = construct(published("kimi-linear-48b-a3b", num_hidden_layers=4)).decoder.layers
    assert [isinstance(layer.self_attn, DeltaAttention) for layer in layers] == [True, True, True, False]
    assert layers[3].self_attn.rope is None


@pytest.mark.parametrize(
    ("rope", "has_rope"),
    [
        ({"rope_theta": None}, False),
        ({"rope_parameters": None}, False),
        ({"rope_parameters": {"rope_type": None}}, False),
        ({"rope_parameters": {"rope_theta": None, "rope_type": "default"}}, False),
        ({"rope_parameters": {"rope_theta": 500_000.0, "rope_type": "default"}}, True),
        ({"rope_theta": 500_000.0}, True),
    ],
)
def test_olmo_hybrid_has_a_rope_where_its_base_is_named(rope, has_rope):
    kinds = ["linear_attention", "full_attention"]
    values = published("olmo-hybrid-7b", num_hidden_layers=2, layer_types=kinds)
    _, layer = construct(values | rope).decoder.layers
    assert (layer.self_attn.rope is not None) == has_rope


@pytest.mark.parametrize(
    ("name", "changes", "said"),
    [
        ("kimi-linear-48b-a3b", {"mla_use_nope": False}, "mla_use_nope=False, of which only True"),
        (
            "kimi-linear-48b-a3b",
            {"num_hidden_layers": 1, "linear_attn_config": {"kda_layers": [1], "gate_upper_bound": -5.0}},
            "linear_attn_config.gate_upper_bound",
        ),
        (
            "ling-3.0-flash",
            {"num_hidden_layers": 41},
            "layer_group_size=6, which does not divide it: add",
        ),
        ("ling-3.0-flash", {"expert_swiglu_limit_list": [4]}, "has 1 entries, fewer than 42 layers"),
        ("ling-3.0-tiny", {"kda_safe_gate": True, "no_kda_lora": False}, "no_kda_lora=False, of which only True"),
        ("olmo-hybrid-7b", {"linear_num_key_heads": 7}, "7 key heads, which must divide its 30 value heads"),
    ],
)
def test_what_no_published_model_has_is_refused(name, changes, said):
    with pytest.raises(ConfigError, match=said):
        construct(published(name, **changes))


def test_kimi_k3_as_published_has_the_text_of_its_text_model(tmp_path):
    """Inside a checkpoint that also sees, with the older names of what mixes residuals."""
    family = FAMILIES["Kimi K3"]
    source = Path(parity.checkpoint_folder(family))
    values = json.loads((source / "config.json").read_text()) | {"topk_method": "noaux_tc"}
    published = {"architectures": ["KimiK3ForConditionalGeneration"], "model_type": "kimi_k3", "text_config": values}
    others = {"vision_config": {"hidden_size": 32}, "image_placeholder": "<|kimi_image_placeholder|>"}
    (tmp_path / "config.json").write_text(json.dumps(published | others))
    tensors = {"vision_tower.patch_embed.weight": np.zeros(3, np.float32)}
    for name, tensor in load_file(source / "model.safetensors").items():
        name = re.sub(r"_res_(norm|proj)\.weight$", r"_res.\1_weight", name)
        tensors[f"language_model.{name}"] = tensor
    save_file(tensors, tmp_path / "model.safetensors")
    config = ModelConfig(str(tmp_path), HFConfig.from_folder(tmp_path), dtype=jnp.float32, max_model_len=1024)
    model = load_model(VllmConfig(config), make_mesh())
    logits, expected = (parity.run_model(each, (17,))[17][0] for each in (model, parity.loaded_model(family)))
    assert np.array_equal(logits, expected)
