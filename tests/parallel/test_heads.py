"""Numbers of devices that can share attention heads."""

import pytest

from jaxis.errors import ConfigError
from jaxis.layers.kv_cache_spec import KVCacheSpec
from jaxis.parallel.equal_shares import check_heads


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "size"), [(32, 8, 4), (32, 8, 32), (28, 4, 28), (4, 1, 4), (5, 5, 1)]
)
def test_equal_shares_are_fine(num_heads, num_kv_heads, size):
    check_heads(num_heads, num_kv_heads, size)


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "size", "message"),
    [
        (28, 4, 8, "tensor_parallel_size=8 does not divide the model's 28 attention heads: give 1, 2 or 4"),
        (4, 1, 8, "tensor_parallel_size=8 does not divide the model's 4 attention heads: give 1, 2 or 4"),
        (
            40,
            10,
            8,
            "tensor_parallel_size=8 and the model's 10 key-value heads: one must divide the other: give 1, 2 or 5",
        ),
        (7, 7, 2, "tensor_parallel_size=2 does not divide the model's 7 attention heads: give 1"),
    ],
)
def test_others_are_one_line_that_says_what_to_give(num_heads, num_kv_heads, size, message):
    """Qwen2.5 7B, Gemma 3 1B, Phi 4; and a model that no devices can share."""
    with pytest.raises(ConfigError) as caught:
        KVCacheSpec(num_kv_heads, 128, num_heads=num_heads).on_devices(size)
    assert str(caught.value) == message


def test_query_heads_need_not_be_known():
    assert KVCacheSpec(2, 64).on_devices(8).num_kv_heads == 8
    with pytest.raises(ConfigError, match="2 key-value heads: one must divide the other: give 1 or 2"):
        KVCacheSpec(2, 64).on_devices(3)
