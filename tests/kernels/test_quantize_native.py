"""Native quantization against the definition in plain JAX, bit for bit."""

from __future__ import annotations

import functools
import importlib
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from jaxis.kernels.weights import WeightScheme, pack, quantize_native
from jaxis.kernels.weights import packed_weight as packed
from tests.support.isa import each_isa, isa  # noqa: F401 (isa is a fixture)
from tests.support.quick_rows import quick_rows

# The package's own `quantize` hides the module of that name.
definition = importlib.import_module("jaxis.kernels.weights.quantize")

METHODS = [
    ("int8", "absmax"),
    ("int4", "absmax"),
    ("int4", "minmax"),
    ("int4", "mse"),
    ("int4", "affine"),
    ("int5", "affine"),
    ("int6", "affine"),
]
DTYPES = [np.float32, ml_dtypes.bfloat16, np.float16]
SHAPES = [(37, 192, 64), (3, 64, 64), (33, 96, 32), (9, 72, None), (7, 40, 10), (65, 1024, 128), (34, 96, None)]
KINDS = ("normal", "ties", "outliers", "every size")


def _weights(rows: int, columns: int, kind: str) -> np.ndarray:
    rng = np.random.default_rng(rows)
    weight = rng.standard_normal((rows, columns)).astype(np.float32)
    if kind == "ties":
        return np.round(weight * 2) / 2
    if kind == "outliers":
        weight[0], weight[1] = 0, -0.0
        weight[2, :5] *= 1e4
    if kind == "every size":
        with np.errstate(under="ignore"):
            weight *= 10.0 ** rng.uniform(-44, 4, (rows, 1)).astype(np.float32)
    return weight


@functools.lru_cache(len(SHAPES) * len(KINDS))  # the next instruction set's test is of the same dtype and method
def _case(rows: int, columns: int, kind: str, dtype: type, scheme: WeightScheme) -> tuple[np.ndarray, Any]:
    """The weight, and what the definition makes of it."""
    weight = _weights(rows, columns, kind).astype(dtype)
    return weight, definition.quantize_by_definition(weight, scheme)


@pytest.mark.sampled(6)
@each_isa
@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize(
    ("dtype", "qtype", "method"),
    quick_rows(
        ((dtype, *scheme) for dtype in DTYPES for scheme in METHODS),
        [*((dtype, *METHODS[0]) for dtype in DTYPES), *((ml_dtypes.bfloat16, *scheme) for scheme in METHODS)],
    ),
)
def test_numbers_are_the_definitions_bit_for_bit(qtype: str, method: str, dtype: type) -> None:
    for rows, columns, tile in SHAPES:
        for kind in KINDS:
            scheme = WeightScheme(qtype, tile, method)
            weight, expected = _case(rows, columns, kind, dtype, scheme)
            got = quantize_native.quantize(weight, scheme)
            assert [a.tobytes() for a in got] == [a.tobytes() for a in expected], (rows, columns, tile, kind)

            at_once = packed.quantize_and_pack(weight, scheme)
            if at_once is not None:
                two_steps = pack(definition.quantize(weight, scheme))
                assert at_once.format == two_steps.format
                np.testing.assert_array_equal(at_once.data, two_steps.data)


def test_a_weight_of_many_parts_is_quantized_as_in_one(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, scheme = _weights(101, 64, "normal"), WeightScheme("int4", 32, "minmax")
    whole = definition.quantize_by_definition(weight, scheme)
    monkeypatch.setattr(definition, "_ELEMENTS_AT_ONCE", 640)
    parts = definition.quantize_by_definition(weight, scheme)
    assert [a.tobytes() for a in parts] == [a.tobytes() for a in whole]


def test_mse_takes_the_scale_with_the_smaller_squared_error() -> None:
    weight = np.random.default_rng(1).standard_normal((200, 64)).astype(np.float32)
    _, scale = definition.quantize_by_definition(weight, WeightScheme("int4", 64, "mse"))
    largest = weight[np.arange(200), np.abs(weight).argmax(axis=1)]
    candidates = [(largest / np.float32(target)).astype(ml_dtypes.bfloat16) for target in (-8, -8.8)]
    errors = []
    for candidate in candidates:
        wide = candidate.astype(np.float64)[:, None]
        errors.append(np.square(np.clip(np.rint(weight / wide), -8, 7) * wide - weight).sum(axis=1))
    np.testing.assert_array_equal(scale[:, 0], np.where(errors[1] < errors[0], candidates[1], candidates[0]))
    assert {True, False} == set((errors[1] < errors[0]).tolist())


@each_isa
@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize(("qtype", "method"), METHODS)
def test_values_that_are_not_finite_are_refused(value: float, qtype: str, method: str) -> None:
    weight = np.ones((40, 64), np.float32)
    weight[39, 63] = value
    assert definition.quantize_by_definition(weight, WeightScheme(qtype, 32, method)) is None
    assert quantize_native.quantize(weight, WeightScheme(qtype, 32, method)) is None
    with pytest.raises(ValueError, match="not finite"):
        packed.quantize_and_pack(weight, WeightScheme(qtype, 32, method))


@each_isa
@pytest.mark.usefixtures("isa")
def test_a_row_that_does_not_lie_in_one_piece_is_read_right() -> None:
    weight = np.random.default_rng(2).standard_normal((64, 40)).astype(np.float32).T
    expected = definition.quantize_by_definition(np.ascontiguousarray(weight), WeightScheme("int8", None, "absmax"))
    got = quantize_native.quantize(weight, WeightScheme("int8", None, "absmax"))
    assert [a.tobytes() for a in got] == [a.tobytes() for a in expected]
