"""Times at which tests run: `tests/data/schedule.yaml` names those that do not run on each push."""

from __future__ import annotations

from collections.abc import Iterable
from operator import attrgetter

import pytest
import yaml

from tests.support.places import TESTS


def mark_nightly_as_slow(items: Iterable[pytest.Item]) -> None:
    """A name that its file does not have is an error, or a test that is renamed would run on each push."""
    nightly = yaml.safe_load((TESTS / "data/schedule.yaml").read_text("utf-8"))["nightly"]
    for item in items:
        file = item.path.relative_to(TESTS).as_posix()
        names = nightly.get(file, ())
        test = item.nodeid.partition("::")[2].partition("[")[0].replace("::", ".")
        if names == "all" or any(f"{test}.".startswith(f"{name}.") for name in names):
            item.add_marker(pytest.mark.slow)
            continue
        module = item.getparent(pytest.Module)
        for name in names:
            try:
                attrgetter(name)(module and module.obj)
            except AttributeError:
                raise pytest.UsageError(f"tests/data/schedule.yaml names {name}, no test of {file}") from None
