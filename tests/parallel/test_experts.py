"""Numbers of devices that can have equally many of a layer's experts."""

import pytest

from jaxis.errors import ConfigError
from jaxis.parallel.equal_shares import check_experts


@pytest.mark.parametrize(("num_experts", "num_devices"), [(8, 1), (8, 8), (256, 64), (6, 3)])
def test_a_number_of_devices_that_divides_the_experts_will_do(num_experts, num_devices):
    check_experts(num_experts, num_devices)


@pytest.mark.parametrize(
    ("num_experts", "num_devices", "choice"),
    [(6, 4, "1, 2 or 3"), (8, 16, "1, 2, 4 or 8"), (5, 4, "1")],
)
def test_others_are_refused_with_those_that_would(num_experts, num_devices, choice):
    message = f"{num_devices} devices cannot have equally many of a layer's {num_experts} experts: give {choice}, or"
    with pytest.raises(ConfigError, match=message):
        check_experts(num_experts, num_devices)
