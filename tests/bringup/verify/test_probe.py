"""The probe sees every module, changes no value, and costs nothing when unused."""

import numpy as np
import pytest

from jaxis.bringup.verify.probe import follow, record
from jaxis.bringup.verify.recording import LOGITS, Values, as_shape
from jaxis.layers.attention_metadata import AttentionMetadata
from jaxis.layers.module import calls_are_observed, calls_observed, named_modules
from jaxis.quantization.wrappers import PackingConfig
from tests.bringup.verify.verified_models import TOKEN_IDS, load, twin


def run(model):
    metadata = AttentionMetadata.for_whole_sequences([len(TOKEN_IDS)])
    _, hidden, _ = model(None, np.asarray(TOKEN_IDS, np.int32), metadata)
    return np.asarray(model.compute_logits(hidden))


@pytest.mark.sampled
@pytest.mark.parametrize("config", ["QWEN_3", "LLAMA_2"])
def test_every_module_is_recorded_and_the_numbers_are_the_models_own(config):
    model = load(config)
    calls = record(model, TOKEN_IDS)
    assert set(calls) == {*(name for name, _ in named_modules(model)), LOGITS}
    logits = run(model)
    np.testing.assert_allclose(calls[LOGITS].outputs.hidden, logits, atol=1e-5 * np.abs(logits).max())
    layer = calls["model.layers.1"]
    np.testing.assert_array_equal(layer.inputs.hidden, calls["model.layers.0"].outputs.hidden)
    np.testing.assert_array_equal(layer.outputs.hidden, calls["model.norm"].inputs.hidden)


def test_products_that_run_in_one_kernel_are_recorded_one_by_one():
    model = load("LLAMA_2", quant_config=PackingConfig())
    assert {name for name, _ in named_modules(model)} <= set(record(model, TOKEN_IDS))


def test_a_model_that_follows_the_reference_has_no_errors_but_its_own():
    model = load("LLAMA_2")
    projection = model.model.layers[0].mlp.up_proj
    projection.weight.set_value(projection.weight[...].at[0, 0].add(1.0))
    events = follow(model, TOKEN_IDS, twin("LLAMA_2")[1])
    wrong = [(event.module, event.begins) for event in events if event.error is not None and event.error > 1e-5]
    assert wrong == [("model.layers.0.mlp.up_proj", False)]


def test_observation_ends_with_its_block():
    norm, seen = load("LLAMA_2").model.norm, []

    def observer(module, *_):
        seen.append((module, calls_are_observed()))
        raise RuntimeError("of the module")

    with calls_observed(observer), pytest.raises(RuntimeError, match="of the module"):
        norm(np.zeros((1, 64), np.float32))
    norm(np.zeros((1, 64), np.float32))
    assert seen == [(norm, True)]
    assert not calls_are_observed()


def test_a_subclass_that_calls_its_base_is_one_call():
    model = load("LLAMA_2")
    norm = model.model.norm
    base = type(norm)
    norm.__class__ = type("Doubling", (base,), {"__call__": lambda self, x: 2 * base.__call__(self, x)})
    calls = record(model, TOKEN_IDS)
    np.testing.assert_allclose(
        calls["model.norm"].outputs.hidden,
        2 * np.asarray(base.__call__(norm, calls["model.norm"].inputs.hidden)),
        rtol=1e-6,
    )


def test_arrays_are_told_apart():
    hidden, logits = np.zeros((5, 8), np.float32), np.ones((5, 4), np.float32)
    ids, weights = np.zeros((5, 2), np.int32), np.ones((5, 2), np.float32)
    found = Values.of([logits, weights, ids])
    assert found.hidden is logits
    assert found.routing.expert_ids is ids
    assert found.routing.expert_weights is weights
    assert Values.of([hidden, ids]).routing is None
    assert Values.of([np.zeros(5, np.int32)]).hidden is None


def test_a_choice_of_experts_said_as_a_weight_for_each_is_understood():
    weights = np.zeros((2, 4), np.float32)
    weights[0, 3], weights[0, 1], weights[1, 0], weights[1, 2] = 0.75, 0.25, 0.5, 0.125
    found = Values(weights).as_routing(2).routing
    assert found.expert_ids.tolist() == [[3, 1], [0, 2]]
    assert found.expert_weights.tolist() == [[0.75, 0.25], [0.5, 0.125]]
    assert Values(weights + 1.0).as_routing(2).routing is None


def test_shapes_of_the_reference_become_ours():
    per_head = np.arange(2 * 5 * 3, dtype=np.float32).reshape(2, 5, 3)
    np.testing.assert_array_equal(as_shape(per_head, (5, 2, 3)), per_head.swapaxes(0, 1))
    flat = np.arange(30, dtype=np.float32).reshape(5, 6)
    np.testing.assert_array_equal(as_shape(flat, (5, 2, 3)), flat.reshape(5, 2, 3))
    assert as_shape(flat, (5, 7)) is None
    assert as_shape(flat, (6, 5)) is None
    one_head = np.arange(15, dtype=np.float32).reshape(1, 5, 3)
    np.testing.assert_array_equal(as_shape(one_head, (5, 3)), one_head[0])
    assert as_shape(None, (5, 6)) is None
