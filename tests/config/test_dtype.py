import pytest

from jaxis.config.checkpoint_values import checkpoint_dtype
from jaxis.config.hf_config import HFConfig


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"torch_dtype": "bfloat16"}, "bfloat16"),
        ({"torch_dtype": "torch.bfloat16"}, "bfloat16"),
        ({"dtype": "BF16"}, "bfloat16"),
        ({"dtype": "half"}, "float16"),
        ({"dtype": "float16", "torch_dtype": "float32"}, "float16"),
        ({"torch_dtype": "auto"}, None),
        ({"torch_dtype": None}, None),
        ({}, None),
        ({"dtype": "bfloat16", "text_config": {"torch_dtype": "float32"}}, "float32"),
        ({"dtype": "bfloat16", "text_config": {}}, "bfloat16"),
        ({"dtype": "float8_e4m3fn"}, "float8_e4m3fn"),
    ],
)
def test_spellings(values, expected):
    assert checkpoint_dtype(HFConfig(values)) == expected
