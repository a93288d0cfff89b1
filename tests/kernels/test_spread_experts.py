"""Experts that lie whole on devices give what one device does, for the tokens of one data rank and of several."""

import pytest

from tests.support.simulated_devices import run_on_devices
from tests.support.weight_stacks import KINDS

QUICK = ["MXFP4"]
OTHERS = [kind for kind in KINDS if kind not in QUICK and not kind.endswith("256")]


@pytest.mark.multi_device
@pytest.mark.parametrize(
    "kinds",
    [QUICK, pytest.param(OTHERS, marks=pytest.mark.slow)],
    ids=["one", "others"],
)
def test_four_devices_or_ranks_give_what_one_does(kinds):
    run_on_devices("-m", "tests.kernels.spread_experts", *kinds)
