"""Tensors of which only headers are known."""

import tracemalloc

import ml_dtypes
import numpy as np
import pytest

from jaxis.config.hf_config import HFConfig
from jaxis.errors import CheckpointError
from jaxis.layers.weight_loader import place_array
from jaxis.loading.headers import HeaderTensor

LARGE = (1 << 20, 1 << 16)


def test_a_header_tensor_takes_no_memory_whatever_is_made_of_it():
    tracemalloc.start()
    tensor = HeaderTensor.of(LARGE, ml_dtypes.bfloat16)
    views = [tensor.T, tensor[::2], tensor.reshape(16, -1), tensor.astype(np.float32), next(iter(tensor))]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 100_000
    assert [view.shape for view in views] == [
        (1 << 16, 1 << 20),
        (1 << 19, 1 << 16),
        (16, 1 << 32),
        LARGE,
        (1 << 16,),
    ]
    assert all(isinstance(view, HeaderTensor) for view in views)
    assert (tensor.nbytes, views[3].dtype) == (1 << 37, np.float32)


def test_headers_are_taken_but_not_placed():
    tensor = HeaderTensor.of(LARGE, np.float32)
    assert place_array(tensor, ("vocab", "embed")) is tensor


def test_a_model_is_filled_with_headers_and_still_refuses_what_does_not_fit(checkpoint):
    from jaxis.config import ModelConfig, VllmConfig
    from jaxis.loading.checkpoint import Checkpoint
    from jaxis.models.model_loader import construct_abstractly, unfilled_parameters

    config = HFConfig.from_folder(checkpoint())
    model = construct_abstractly(VllmConfig(ModelConfig("x", config)))
    with Checkpoint(checkpoint()) as weights:
        headers = {name: HeaderTensor.of(weights.info(name).shape, np.float32) for name in weights.names()}
    assert len(unfilled_parameters(model)) == len(headers)
    model.load_weights(iter(headers.items()))
    assert unfilled_parameters(model) == []
    with pytest.raises(CheckpointError, match="has no parameter"):
        model.load_weights(iter([("model.extra.weight", HeaderTensor.of((2,), np.float32))]))
