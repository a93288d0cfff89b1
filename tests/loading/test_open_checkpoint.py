"""The listing of a checkpoint's tensors."""

import numpy as np
import pytest
from safetensors.numpy import save_file

from jaxis.errors import CheckpointError
from jaxis.loading.open_checkpoint import TensorListing, open_checkpoint


def test_a_listing_has_the_headers_of_all_tensors(tmp_path):
    tensors = {"a.qweight": np.zeros((2, 3), np.int32), "a.scales": np.zeros((1, 3), np.float16)}
    save_file(tensors, tmp_path / "model.safetensors")
    listing = TensorListing(tmp_path)
    assert set(listing) == set(tensors)
    assert len(listing) == 2
    assert "b.qweight" not in listing
    assert (listing["a.scales"].shape, listing["a.scales"].dtype) == ((1, 3), np.dtype(np.float16))


def test_a_listing_opens_the_checkpoint_when_it_is_first_used(tmp_path):
    listing = TensorListing(tmp_path / "missing")
    with pytest.raises(CheckpointError, match="missing is not a folder"):
        listing.get("a")


def test_a_listing_has_the_files_metadata(tmp_path):
    save_file({"a": np.zeros(2, np.float32)}, tmp_path / "model.safetensors", metadata={"maker": "someone"})
    assert TensorListing(tmp_path).infos.metadata == {"maker": "someone"}


def test_experts_of_mlx_are_named_as_elsewhere(tmp_path):
    name = "model.layers.0.mlp.switch_mlp.up_proj.weight"
    save_file({name: np.ones((2, 3), np.float32)}, tmp_path / "model.safetensors", metadata={"format": "mlx"})
    with open_checkpoint(tmp_path) as checkpoint:
        [(read, tensor)] = checkpoint.iterate()
        assert (read,) == checkpoint.names() == ("model.layers.0.mlp.experts.up_proj.weight",)
        np.testing.assert_array_equal(tensor, np.ones((2, 3)))
        assert checkpoint.tensor(read).shape == checkpoint.info(read).shape == (2, 3)
