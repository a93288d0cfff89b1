"""The arrays that a model's programs leave on the devices for each other: caches, sampled tokens, hidden states."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from jaxis.engine.execution.kv_cache import make_kv_caches
from jaxis.engine.execution.program_context import ProgramContext
from jaxis.parallel.mesh import put


class DeviceState:
    """The arrays of a model, or of one of its pipeline stages, between two calls of its programs.

    Attributes:
      context: Context that the programs were traced for, with the model's weights.
      caches: The caches of the model's layers, then those of the draft layers.
      last_tokens: The tokens that the last step sampled, int32 [max R] of each data rank.
      handed_on: Hidden states that the previous stage has handed on; None for the first stage.
      hidden: Hidden states of the last call, [T, E]; None once they were used.
      rows: The rows of `hidden` to sample from, [S, E]; None once they were sampled from.
      aux: Auxiliary hidden states, shaped like `hidden`, if there are draft layers.
    """

    def __init__(self, context: ProgramContext) -> None:
        """Allocates the caches.

        Raises:
          EngineError: No memory for the caches.
        """
        self.context = context
        self.caches = make_kv_caches(context.caches)
        self.handed_on: jax.Array | None = None
        self._forget_last_tokens()

    @property
    def model_caches(self) -> list[Any]:
        return self.caches[: self.context.num_model_caches]

    @property
    def draft_caches(self) -> list[Any]:
        return self.caches[self.context.num_model_caches :]

    @property
    def given(self) -> jax.Array:
        """The input of a stage's forward pass beside the step: last tokens, or the previous stage's hidden states."""
        return self.last_tokens if self.handed_on is None else self.handed_on

    @property
    def newest(self) -> Any:
        """The arrays that are ready once the devices have done all dispatched work."""
        return self.last_tokens if self.context.stage.is_last else self.hidden

    def forget_hidden(self) -> None:
        """Drops the hidden states, so that the next call can have their memory."""
        self.hidden: jax.Array | None = None
        self.rows: jax.Array | None = None
        self.aux: Sequence[jax.Array] = []

    def recover(self) -> None:
        """Makes new caches after a step that failed or was interrupted midway.

        The outputs of that step may be missing, or hold an error that surfaces only when they are read.
        """
        self.caches = []
        self.caches = make_kv_caches(self.context.caches)
        self._forget_last_tokens()

    def release(self) -> None:
        self.context.model.release()
        self.caches = []
        self.forget_hidden()

    def _forget_last_tokens(self) -> None:
        self.forget_hidden()
        last = self.context.ranks.struct((self.context.max_num_seqs,), jnp.int32)
        self.last_tokens = put(np.zeros(last.shape, last.dtype), cast(NamedSharding, last.sharding))
