"""Figures as text."""

import pytest

from jaxis.bench.text import format_bytes, format_limits, format_number, format_share, format_table


def test_columns_are_aligned():
    assert format_table(("name", "n"), [("a", "1"), ("long name", "1000")]) == (
        "name          n\na             1\nlong name  1000"
    )


@pytest.mark.parametrize(
    ("value", "text"), [(1234.5, "1234"), (99.96, "100.0"), (12.34, "12.3"), (1.234, "1.23"), (0, "0.00"), (None, "-")]
)
def test_numbers_have_three_digits(value, text):
    assert format_number(value) == text


@pytest.mark.parametrize(("value", "text"), [(2.5e9, "2.50 GB"), (12_345_678, "12.3 MB"), (None, "-")])
def test_bytes_are_counted_in_powers_of_1000(value, text):
    assert format_bytes(value) == text


def test_shares_are_percentages():
    assert (format_share(0.856), format_share(None)) == ("86%", "-")


def test_limits_are_one_line():
    limits = {"num_threads": 4, "read_bytes_per_second": 50e9, "copy_bytes_per_second": 60e9, "flops_per_second": 4e11}
    assert format_limits(limits) == "4 threads: reads 50.0 GB/s, copies 60.0 GB/s (read and written), 400 GFLOP/s"
    limits |= {"num_threads": None, "read_bytes_per_second": None}
    assert format_limits(limits) == "copies 60.0 GB/s (read and written), 400 GFLOP/s"
