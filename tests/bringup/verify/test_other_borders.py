"""Verdicts of `verify` on a family whose modules the reference calls another number of times, or has otherwise."""

import functools
import json
import tempfile
from pathlib import Path

import pytest

from jaxis.bringup.analyze.construction import construct
from jaxis.bringup.verify.verify import verify
from tests.bringup.verify import nanochat
from tests.bringup.verify.verified_models import registered
from tests.support import parity


@functools.cache
def verified(model_class, **changes):
    with tempfile.TemporaryDirectory() as folder, registered("NanoChatForCausalLM", model_class):
        path = Path(folder) / "config.json"
        path.write_text(json.dumps({**nanochat.CONFIG, **changes}))
        return verify(str(path), prompt_lengths=[17])


def test_a_right_model_whose_reference_calls_a_module_twice_passes():
    result = verified(nanochat.NanoChatForCausalLM)
    assert result.passed, str(result.layers.divergence)
    assert result.layers.call_counts == {"model.norm": (2, 1)}
    assert result.notes() == [
        "the reference calls model.norm twice, jaxis once",
        "not compared, since the reference has no module of the name: model.embed_norm",
    ]


@pytest.mark.slow
def test_the_second_call_of_a_module_is_compared_with_the_second():
    renames = (*nanochat.NanoChatForCausalLM.renames, ("model.norm", "model.embed_norm"))
    result = verified(type("Renamed", (nanochat.NanoChatForCausalLM,), {"renames": renames}))
    assert result.passed, str(result.layers.divergence)
    assert result.notes() == []
    assert {"model.norm", "model.norm#2"} <= {module.name for module in result.layers.modules}


def test_the_same_function_with_other_borders_is_said_to_be_the_same():
    result = verified(nanochat.with_layers(nanochat.NormBeforeRopeLayer))
    assert result.failing_checks == ("layers",)
    assert any(
        note.startswith("logits agree: jaxis computes the same with other module borders") for note in result.notes()
    )
    assert result.to_dict()["status"] == "differs"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "modules", "least"),
    [
        ("GLM-5.3-Flash", ["model.language_model.layers.0.self_attn.o_norm"], 80),
        ("Qwen3.8-Flash-Next", ["model.layers.0.ple", "model.layers.0.attn_hyper_connection"], 60),
        ("DeepSeek V4", ["layers.1.attn.wq_b", "layers.3.ffn.experts"], 60),
    ],
)
def test_modules_are_compared_whatever_names_and_gated_norms_the_reference_has(name, modules, least):
    [family] = [family for family in parity.FAMILIES if family.name == name]
    result = verify(parity.checkpoint_folder(family), only=["layers", "logits"], prompt_lengths=[17])
    assert result.passed, str(result.layers.divergence)
    compared = {module.name for module in result.layers.modules if module.own_error is not None}
    assert compared >= set(modules)
    assert len(compared) >= least


@pytest.mark.slow
def test_an_epsilon_of_heads_that_is_not_config_jsons_shows():
    result = verified(nanochat.with_layers(nanochat.OtherHeadEpsilonLayer))
    assert result.layers.divergence.module == "model.layers.0.self_attn.q_norm"
    assert result.layers.divergence.code == "own_output"


@pytest.mark.slow
def test_norms_without_weights_that_are_not_called_are_named():
    divergence = verified(nanochat.with_layers(nanochat.NoHeadNormsLayer)).layers.divergence
    assert divergence.module == "model.layers.0.self_attn"
    assert divergence.not_called == ("q_norm", "k_norm")
    assert (divergence.code, divergence.after, divergence.before) == ("between_children", "v_proj", "o_proj")


@pytest.mark.slow
def test_a_forgotten_call_of_a_module_that_is_called_elsewhere_is_said():
    result = verified(nanochat.NoNormOfEmbeddings)
    assert result.layers.divergence.module == "model"
    assert "the reference calls model.norm twice, jaxis once" in result.notes()


def test_wrong_logits_are_no_reason_to_accept_other_tokens():
    result = verified(nanochat.with_layers(nanochat.RopeOfTheUsualSignLayer))
    assert "what it gives q_norm after v_proj" in str(result.layers.divergence)
    assert not any(check.passed for check in result.logits)
    assert not result.decode.passed
    assert result.decode.skipped == "logits failed"
    assert result.failing_checks == ("layers", "logits", "decode")


def test_a_cap_that_config_json_says_is_none_is_none():
    model = nanochat.NanoChatForCausalLM
    with registered("NanoChatForCausalLM", model):
        config = {**nanochat.CONFIG, "final_logit_softcapping": None}
        assert _cap_of(config) is None
        assert _cap_of(nanochat.CONFIG) == 15.0


def _cap_of(config):
    return construct(config, "config.json").model.logits_soft_cap
