"""Models with layers that draft, each written once for all tests of drafting."""

import pytest

from tests.engine.drafting.draft_runs import folder_writer


@pytest.fixture(scope="session")
def folders(tmp_path_factory):
    """`folders(kind)`: the folder of the model, and that of the layers if they have one of their own."""
    return folder_writer(tmp_path_factory.mktemp)
