"""Groups of tests that a worker of pytest-xdist gets together, and their order.

A file's tests share fixtures and compiled programs, so they stay on one worker. The families of the parity tests share
nothing with each other: each is a unit of its own, or one worker would still be at them when the others have ended.
Files that take longest come first, and those many small units last, for the same reason.
"""

from __future__ import annotations

from xdist.scheduler import LoadScopeScheduling

# Files whose tests stay together by their parameter: `test_x[A]` and `test_y[A]`.
BY_PARAMETER = {"tests/models/test_parity.py", "tests/models/test_parity_of_llm.py"}
FIRST = (
    "tests/engine/client/test_engine_process.py",
    "tests/inference/test_resume.py",
    "tests/engine/test_batch_invariance.py",
    "tests/lora/test_requests.py",
    "tests/parallel/test_mesh.py",
    "tests/training/test_engine_forward.py",
    "tests/test_package.py",
    "tests/kernels/test_ragged_paged_attention.py",
    "tests/engine/drafting/test_identity_with_layers.py",
    "tests/engine/drafting/test_identity.py",
    "tests/cli/test_models.py",
    "tests/training/test_against_torch.py",
    "tests/bringup/verify/test_verify.py",
)


class ByFileOrParameter(LoadScopeScheduling):
    """`--dist loadfile` with the units above."""

    def _split_scope(self, nodeid: str) -> str:
        return unit(nodeid)


def unit(nodeid: str) -> str:
    """Name of the group that the test is run in."""
    file = nodeid.partition("::")[0]
    return file + nodeid[nodeid.find("[") :] if file in BY_PARAMETER and "[" in nodeid else file


def rank(nodeid: str) -> int:
    """Smaller for tests that are to begin earlier."""
    file = nodeid.partition("::")[0]
    if file in BY_PARAMETER:
        return len(FIRST) + 1
    return FIRST.index(file) if file in FIRST else len(FIRST)
