"""Names of machines: which devices they stand for, and what is said of names and numbers that do not exist."""

from __future__ import annotations

import pytest

from jaxis.compilation import targets
from jaxis.compilation.accelerators import ACCELERATORS
from jaxis.compilation.targets import parse_target
from jaxis.errors import ConfigError

SIZES = {
    "v5e": ("v5e:1x1", 1),
    "v6e-8": ("v6e:2x4", 8),
    "V6E-8 ": ("v6e:2x4", 8),
    "v5e:4x4": ("v5e:4x4", 16),
    # Two cores a chip: one device of v5p, two of TPU7x.
    "v5p-8": ("v5p:2x2x1", 4),
    "v4-8": ("v4:2x2x1", 4),
    "v5p:2x2": ("v5p:2x2x1", 4),
    "tpu7x-8": ("tpu7x:2x2x1", 8),
    "h100": ("h100x1", 1),
    "h100x8": ("h100x8", 8),
    "b200-16": ("b200x16", 16),
}


@pytest.mark.parametrize("name", SIZES)
def test_a_name_stands_for_a_number_of_devices(name):
    target = parse_target(name)
    assert (str(target), target.num_devices) == SIZES[name]
    assert parse_target(str(target)) == target


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("", "give one of v4, v5e"),
        ("v6", "give one of v4, v5e"),
        ("v6e-3", "v6e-1, v6e-4"),
        ("v5e-0", "v5e-1, v5e-4"),
        ("v5p-9", "v5p-8, v5p-16"),
        ("v5e:3x3", "1x1, 2x2"),
        ("h100x9", "h100x8"),
        ("h100x0", "h100x8"),
        ("a100:2x2", "a100x8"),
    ],
)
def test_an_unknown_name_is_refused_with_those_that_exist(name, says):
    with pytest.raises(ConfigError, match=f"{name!r}.*{says}"):
        parse_target(name)


def test_a_missing_compiler_is_named_with_what_installs_it(monkeypatch):
    monkeypatch.setattr(targets.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"v5e needs libtpu: pip install 'jaxis\[compile-tpu\]'"):
        parse_target("v5e").devices()
    with pytest.raises(ConfigError, match=r"h100 needs jax_cuda13_plugin: pip install 'jaxis\[compile-gpu\]'"):
        parse_target("h100").devices()


def test_programs_cannot_use_more_memory_than_there_is():
    for accelerator in ACCELERATORS.values():
        assert 0.7 * accelerator.memory_bytes < accelerator.usable_bytes <= accelerator.memory_bytes
