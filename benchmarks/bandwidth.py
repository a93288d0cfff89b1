"""Measures this machine's limits, memory and arithmetic, with one thread and more.

python benchmarks/bandwidth.py
python benchmarks/bandwidth.py 1 2 4
"""

from __future__ import annotations

import argparse

from jaxis.bench.limits import measure_limits
from jaxis.bench.text import format_limits
from jaxis.host.machine import usable_cores


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    powers = [1 << i for i in range(usable_cores().bit_length() - 1)]
    default = [*powers, usable_cores()]
    parser.add_argument("threads", type=int, nargs="*", default=default, help="default: powers of two, and all cores")
    for num_threads in parser.parse_args().threads:
        print(format_limits(measure_limits(num_threads).to_json()))


if __name__ == "__main__":
    main()
