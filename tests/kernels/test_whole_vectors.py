"""Elementwise functions, as XLA compiles them for users: a row's bits do not depend on the rows beside it."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import numpy as np
import pytest

from jaxis.kernels import native

pytestmark = pytest.mark.skipif(not native.usable(), reason="XLA does not promise it")


def differing_rows() -> dict[str, int]:
    """Function -> how many rows have other bits among fewer others."""
    import jax
    import jax.numpy as jnp

    from jaxis.kernels.materialize import in_whole_vectors
    from jaxis.kernels.sampling import logsumexp

    x = np.random.default_rng(0).uniform(0.01, 1, 240).astype(np.float32)
    functions = {
        "log": lambda x: in_whole_vectors(jnp.log, x[:, None]),
        "exp": lambda x: in_whole_vectors(jnp.exp, x[:, None]),
        "tanh": lambda x: in_whole_vectors(jnp.tanh, x[:, None]),
        "sigmoid": lambda x: in_whole_vectors(jax.nn.sigmoid, x[:, None]),
        "logsumexp": lambda x: logsumexp(jnp.outer(x, jnp.arange(30.0))),
        "by XLA alone": jnp.log,
    }
    counts = {}
    for name, function in functions.items():
        program = jax.jit(function)
        together = np.asarray(program(x))
        fewer = [np.asarray(program(x[i : i + rows])) for rows in (1, 3, 5) for i in range(0, len(x), rows)]
        counts[name] = int((np.concatenate(fewer).reshape(3, -1) != together.reshape(-1)).sum())
    return counts


def test_a_row_has_the_same_bits_among_any_number_of_others() -> None:
    script = (
        "import json; from tests.kernels.test_whole_vectors import differing_rows; print(json.dumps(differing_rows()))"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "XLA_FLAGS": ""}
    output = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    counts = json.loads(output.stdout)
    by_xla = counts.pop("by XLA alone")
    assert set(counts.values()) == {0}, counts
    if sys.platform == "linux" and os.uname().machine == "x86_64":
        assert by_xla > 0, "XLA has become the same for all: in_whole_vectors is not needed any more"


def test_values_are_the_functions() -> None:
    import jax.numpy as jnp

    from jaxis.kernels.materialize import in_whole_vectors

    x = np.random.default_rng(1).uniform(0.01, 9, (3, 2, 21)).astype(np.float32)
    np.testing.assert_allclose(in_whole_vectors(jnp.log, jnp.asarray(x)), np.log(x.astype(np.float64)), 1e-6, 1e-7)
