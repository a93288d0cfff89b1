"""Limits of a recurrence's steps that are no limits, as config.json writes them."""

import math

import pytest

from jaxis.config.hf_config import HFConfig
from jaxis.errors import ConfigError
from jaxis.models.common.mamba import check_mamba_keys


@pytest.mark.parametrize("limit", [math.inf, "Infinity", {"__float__": "Infinity"}, 1e308, 3.5e38])
def test_what_no_float32_exceeds_is_no_limit(limit):
    check_mamba_keys(HFConfig({"time_step_limit": [0.0, limit]}))


@pytest.mark.parametrize("limit", [[0.0, 0.1], [0.001, math.inf], [0.0, "0.1"], 5, [0.0]])
def test_a_limit_is_refused(limit):
    with pytest.raises(ConfigError, match="time_step_limit"):
        check_mamba_keys(HFConfig({"time_step_limit": limit}))
