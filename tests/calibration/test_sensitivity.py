"""Sensitivities against the divergence that quantizing one module really causes, on the embedded model."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxis import LLM
from jaxis.calibration import sensitivity
from jaxis.calibration.evaluate import SourcePredictions
from jaxis.calibration.sensitivity import measure_sensitivity
from jaxis.calibration.text import read_windows
from jaxis.calibration.widths import WIDTH_RULES, choose_rules
from jaxis.engine.opened_model import EMBEDDED_MODEL
from jaxis.errors import CheckpointError
from jaxis.kernels.weights import dequantize, quantize
from jaxis.quantization.checkpoint import quantize_checkpoint
from jaxis.quantization.rules import RuleQuantizationConfig, weight_scheme
from jaxis.quantization_rules import QuantizationRule
from jaxis.tokenizer import Tokenizer
from tests.support.places import REPOSITORY

TEXT = REPOSITORY / "tests" / "data" / "tiny_eval.jsonl"


@pytest.fixture(scope="module")
def windows():
    """Questions and answers of the embedded model's kind, in windows of one length."""
    found = read_windows(TEXT, Tokenizer.from_path(EMBEDDED_MODEL), 48)
    return [window for window in found if len(window) == 48][:24]


@pytest.fixture(scope="module")
def sensitivities(windows):
    return measure_sensitivity(EMBEDDED_MODEL, windows, WIDTH_RULES)


def test_every_module_has_an_option_for_each_width(sensitivities):
    with LLM(quantization="int8", show_progress=False) as llm:
        expected = llm.weight_bytes
    assert len(sensitivities) == 29
    assert sum(each.num_weights for each in sensitivities) == 3_145_728
    for each in sensitivities:
        bits = [8 * option.num_bytes / each.num_weights for option in each.options]
        assert bits == sorted(bits)
        divergences = [option.kl for option in each.options]
        assert divergences == sorted(divergences, reverse=True)
    int8 = sum(each.options[-1].num_bytes for each in sensitivities)
    assert int8 == pytest.approx(expected, rel=0.02)  # norms are not weights of modules


def test_sensitivities_are_the_divergences_that_quantizing_one_module_causes(sensitivities, windows):
    """To second order, without quantized activations; of every sixth module, from the least sensitive on."""
    ranked = sorted(sensitivities, key=lambda each: each.options[1].kl)
    predicted, measured = [], []
    with LLM(show_progress=False) as llm:
        expected = [llm.compute_logits(window) for window in windows[::4]]
    for module in ranked[::6]:
        rule = QuantizationRule(module.name, "int5", None, 32, "affine")
        with LLM(quantization=[rule], show_progress=False) as llm:
            kl = [divergence(p, llm.compute_logits(w)) for p, w in zip(expected, windows[::4], strict=True)]
        predicted.append(module.options[1].kl)
        measured.append(np.mean(kl))
    ratio = np.log(measured) - np.log(predicted)
    assert np.abs(ratio).max() < np.log(3)
    assert np.corrcoef(np.log(predicted), np.log(measured))[0, 1] > 0.9


def divergence(source, quantized):
    p, q = (jax.nn.log_softmax(jnp.asarray(each), axis=-1) for each in (source, quantized))
    return float((jnp.exp(p) * (p - q)).sum(-1).mean())


def test_chosen_widths_are_better_than_one_width_at_no_more_bytes(tmp_path):
    uniform = [QuantizationRule(".*", "int5", "int8", 32, "affine")]
    with SourcePredictions(EMBEDDED_MODEL, [text_of_answers(tmp_path)]) as source:
        alike = source.evaluate(EMBEDDED_MODEL, quantization=uniform)
        bits = 8 * alike.quantized_bytes / 3_145_728
        rules = choose_rules(EMBEDDED_MODEL, [tmp_path / "answers.jsonl"], source, target_bits=bits)
        chosen = source.evaluate(EMBEDDED_MODEL, quantization=rules)
        assert chosen.quantized_bytes <= 1.01 * alike.quantized_bytes
        assert chosen.kl_mean < 0.8 * alike.kl_mean
        assert len({rule.weight_qtype for rule in rules}) > 1


def test_a_limit_of_divergence_is_kept(tmp_path):
    with SourcePredictions(EMBEDDED_MODEL, [text_of_answers(tmp_path)]) as source:
        rules = choose_rules(EMBEDDED_MODEL, [tmp_path / "answers.jsonl"], source, max_kl=0.002)
        assert source.evaluate(EMBEDDED_MODEL, quantization=rules).kl_mean <= 0.002
        assert len({rule.weight_qtype for rule in rules}) > 1


def test_a_quantized_source_is_refused(tmp_path):
    quantize_checkpoint(EMBEDDED_MODEL, tmp_path / "q", RuleQuantizationConfig([QuantizationRule(".*", "int8")]))
    with (
        SourcePredictions(tmp_path / "q", [text_of_answers(tmp_path)]) as source,
        pytest.raises(CheckpointError, match="is quantized already"),
    ):
        choose_rules(tmp_path / "q", [tmp_path / "answers.jsonl"], source, target_bits=5)


def text_of_answers(folder):
    """A few of the questions that the embedded model answers, as one conversation."""
    lines = TEXT.read_text().splitlines()[::12]
    rows = [json.loads(line) for line in lines]
    messages = [
        message for row in rows for message in (*row["messages"], {"role": "assistant", "content": row["answer"]})
    ]
    (folder / "answers.jsonl").write_text(json.dumps({"messages": messages}))
    return folder / "answers.jsonl"


def test_the_estimate_is_half_the_error_weighted_by_the_fisher_information():
    rng = np.random.default_rng(0)
    weight, squares = rng.standard_normal((48, 64), np.float32), rng.random((48, 64), np.float32)
    result = sensitivity.module_sensitivity("a", [(weight, squares)], WIDTH_RULES, num_tokens=10)
    for option in result.options:
        scheme = weight_scheme(option.rule)
        error = np.asarray(dequantize(quantize(weight, scheme)), np.float64) - weight
        np.testing.assert_allclose(option.kl, 0.5 * (squares / 10 * error**2).sum(), rtol=1e-5)
