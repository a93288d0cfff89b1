"""The checks of kernels, the model and speed: they pass here, and see a fault that was planted."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxis.compilation.accelerators import ACCELERATORS
from jaxis.doctor import attention_cases, model_cases, product_cases, speed_case
from jaxis.doctor.check import run_case
from jaxis.parallel.mesh import make_mesh


def kernel_cases():
    return {
        case.name: case
        for cases in (attention_cases.attention_cases, product_cases.product_cases)
        for case in cases(jnp.float32, 1e-4)
    }


@pytest.mark.sampled(8)
@pytest.mark.parametrize("name", kernel_cases())
def test_kernels_agree_with_their_definitions(name):
    with jax.set_mesh(make_mesh()):
        check = run_case(kernel_cases()[name])
    assert check.passed, check.detail


def plant(monkeypatch, module, name, spoil):
    kernel = getattr(module, name)
    monkeypatch.setattr(module, name, lambda *args, **options: spoil(kernel(*args, **options)))


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("module", "kernel", "case", "spoil"),
    [
        (
            attention_cases,
            "ragged_paged_attention",
            "paged attention, head size 64",
            lambda out: (out[0], out[1] * 1.01),
        ),
        (attention_cases, "latent_attention", "latent attention 512 + 64", lambda out: (out[0], out[1].at[0].add(1))),
        (product_cases, "matmul", "product, 64 x 1024 x 512, int8", lambda y: y.at[:, 7].set(0)),
        (product_cases, "experts", "experts, 48 tokens, floats", lambda y: y[::-1]),
        (product_cases, "rms_norm", "RMS norm", lambda y: y * 1.01),
        (product_cases, "rotary_embedding", "rotary embedding", lambda y: (y[0], -y[1])),
        (
            product_cases,
            "argmax",
            "arg-max, top tokens and log-sum-exp of 32,000 logits",
            lambda out: (out[0] + 1, out[1]),
        ),
    ],
)
def test_a_planted_fault_is_seen(monkeypatch, module, kernel, case, spoil):
    plant(monkeypatch, module, kernel, spoil)
    assert not run_case(kernel_cases()[case]).passed


def test_a_window_that_is_off_by_one_is_seen(monkeypatch):
    """The context that a token sees is part of what is checked, not only the sums over it."""
    attend = attention_cases.ragged_paged_attention

    def wider(*args, span, **options):
        return attend(*args, span=type(span)(span.sliding_window + 1), **options)

    monkeypatch.setattr(attention_cases, "ragged_paged_attention", wider)
    assert not run_case(kernel_cases()["paged attention, head size 128, window"]).passed


def test_the_embedded_model_answers_and_a_wrong_answer_is_named(monkeypatch):
    [case] = model_cases.model_cases()
    check = run_case(case)
    assert check.passed, check.detail
    monkeypatch.setitem(model_cases.ANSWERS, "What is the capital of France?", "The capital of France is Rome.")
    check = run_case(case)
    assert not check.passed
    assert "'The capital of France is Paris.' instead of 'The capital of France is Rome.'" in check.detail


def test_the_bound_is_that_of_the_models_weights(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(speed_case.MODEL))
    h100 = ACCELERATORS["h100"]
    least = speed_case.least_seconds(str(tmp_path), h100)
    parameters = 596_049_920  # as Qwen3-0.6B's model card counts them, its embedding tied
    context = 128 + 33 // 2
    expected = (2 * parameters + context * 28 * 2 * 8 * 128 * 2) / h100.memory_bandwidth
    assert least[1] == pytest.approx(expected)
    assert np.all(np.diff(list(least.values())) > 0)
