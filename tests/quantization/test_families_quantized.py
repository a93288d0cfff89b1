"""Every family quantized, as it is loaded or as a copy: what is quantized, and what the logits are then."""

import re
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxis.bringup.verify.compare import relative_error
from jaxis.quantization.arguments import parse_quantization
from jaxis.quantization.checkpoint import quantize_checkpoint
from tests.support import parity
from tests.support.dequantized import dequantize
from tests.support.parity import FAMILIES
from tests.support.quantized_models import load, logits, values

IDS = [1, 5, 9, 120, 33, 44, 45, 7, 99, 98, 97]
BY_NAME = {family.name: family for family in FAMILIES}
# Attention, convolutions, states and experts. Of the other families, the first row with each of transformers'
# configurations.
QUICK = ("Nemotron 3", "Qwen3.5")
_FIRST = {family.config_class: family.name for family in reversed(FAMILIES)}
OTHERS = [name for name in _FIRST.values() if name not in QUICK]
# Also in 4 bits.
LOW_PRECISION = (
    *QUICK,
    *("LFM2", "MiniMax M2"),
    *("DeepSeek V3.2", "Gemma 4, shared keys and values, embeddings of layers"),
    *("Falcon Mamba", "Gemma 3n", "GPT-OSS", "Jamba", "Kimi Linear", "Llama 4", "MiMo V2 Flash", "Mistral 4"),
    *("OLMo Hybrid", "Step 3.5", "Hy4", "GLM-5.3-Flash", "Step 5", "LongCat-Flash", "LongCat 2.0", "Ling 2.5"),
    *("Mistral Large 4", "Inkling", "Inkling 2", "DeepSeek V4.1"),
)
# Matrices of few elements that decide much, or that no vector is multiplied by; they stay as they are.
FLOATS = re.compile(
    r"\.gate\.|router\.|shared_expert_gate\.|in_proj_(a|b|ba)\.|\.(a|b)_proj\.|dt_proj\.|conv1d\.|conv\.conv\.|A_log$"
    r"|weights_proj\.|altup\.|_hc\.(?!input_mix)|compress_|norm\.mixer\.|embed_positions\.|sconv\.|rel_logits_proj\."
    r"|_input\.query\.|attn_res\.query\.|attn_sink_proj\.|[qr]_norm\.scale$|_bias$"
    r"|engram\.[qk]_weight$|compressor\.(kv|gate)_proj\."
)
# DeepSeek V4.1's, whose keys are made of compressed entries, in float32.
FLOATS_OF = {"DeepSeek V4.1": re.compile(r"indexer\.k_proj\.")}
# These are split into factors of heads or groups when loading ends: their floats are those that int8 stands for.
SPLIT = (".kv_b_proj.weight", ".o_a_proj.weight")


def test_every_configuration_has_a_row():
    assert set(QUICK) | set(LOW_PRECISION) <= set(BY_NAME)
    assert {BY_NAME[name].config_class for name in (*QUICK, *OTHERS)} == {family.config_class for family in FAMILIES}


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("name", "qtype"),
    [
        *((name, "int8") for name in QUICK),
        *(pytest.param(name, "int8", marks=pytest.mark.slow) for name in OTHERS),
        *(pytest.param(name, "int4", marks=pytest.mark.slow) for name in LOW_PRECISION),
    ],
)
def test_logits_are_those_of_what_the_quantized_matrices_stand_for(name, qtype):
    """All matrices but routers, gates, decays and convolutions are quantized, and nothing else is changed."""
    folder = Path(parity.checkpoint_folder(BY_NAME[name]))
    reference = load(folder)
    model = load(folder, [{"module_path": ".*", "weight_qtype": qtype}])
    held = values(model)
    for parameter, param in reference.named_parameters():
        value = held[parameter]
        stays = any(each.search(parameter) for each in (FLOATS, FLOATS_OF.get(name, FLOATS)))
        _check_held(parameter, value, param.get_value(), {"int8": 0.01, "int4": 0.2}[qtype], stays=stays)
        param.set_value(value if isinstance(value, jax.Array) else dequantize(value))
    # Of the same weights: only the order of sums may differ.
    assert relative_error(logits(model, IDS), logits(reference, IDS)) < 1e-4


# Tensors whose names differ from those of parameters: a norm and the embeddings.
@pytest.mark.parametrize(
    "name",
    ["Nemotron 3", *(pytest.param(name, marks=pytest.mark.slow) for name in _FIRST.values() if name != "Nemotron 3")],
)
def test_a_quantized_copy_is_the_model_quantized_as_it_is_loaded(name, tmp_path):
    folder = Path(parity.checkpoint_folder(BY_NAME[name]))
    quantize_checkpoint(folder, tmp_path / "int8", parse_quantization("int8"))
    ours, theirs = values(load(tmp_path / "int8")), values(load(folder, "int8"))
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    jax.tree.map(np.testing.assert_array_equal, ours, theirs)


def _check_held(parameter, value, before, bound, *, stays):
    if parameter.endswith(SPLIT):
        assert isinstance(value, jax.Array)
        assert 0 < _distance(value, before) < bound, parameter
    elif before.ndim < 2 or stays:
        assert isinstance(value, jax.Array), parameter
        np.testing.assert_array_equal(value, before)
    else:
        assert not isinstance(value, jax.Array), parameter
        assert 0 < _distance(dequantize(value), before) < bound, parameter


def _distance(actual, expected):
    return np.linalg.norm(np.asarray(actual) - expected) / np.linalg.norm(expected)
