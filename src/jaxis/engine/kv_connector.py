"""The interface between an engine and the storage of KV cache blocks beyond its devices."""

from __future__ import annotations

from collections.abc import Sequence as AbstractSequence
from dataclasses import dataclass
from typing import Any

from jaxis.engine.scheduling.block_connector import BlockConnector
from jaxis.engine.scheduling.data_ranks import DataRanksScheduler
from jaxis.engine.scheduling.scheduler import Scheduler
from jaxis.engine.scheduling.scheduler_output import SchedulerOutput
from jaxis.engine.scheduling.sequence import Sequence
from jaxis.errors import RequestError
from jaxis.host.threads import Deadline
from jaxis.sampling_params import SamplingParams

FETCH_SECONDS = 10.0
"""Longest wait of a prompt for blocks; those that have not arrived by then are computed."""


@dataclass
class TierStats:
    """Counters of one tier of blocks beyond the devices, since the start.

    Attributes:
      saved_blocks, saved_bytes: Blocks written to the tier; for other engines, blocks sent to them.
      loaded_blocks, loaded_bytes: Blocks found in the tier and read from it.
      missed_blocks: Full blocks of prompts that were looked for here and not found.
      failed_blocks: Blocks not saved or loaded because of an error; each is computed anew when it is needed.
      used_bytes: Current size of the tier's blocks.
    """

    saved_blocks: int = 0
    saved_bytes: int = 0
    loaded_blocks: int = 0
    loaded_bytes: int = 0
    missed_blocks: int = 0
    failed_blocks: int = 0
    used_bytes: int = 0


class KVConnector:
    """The engine's reports of its steps and requests to an object that stores or observes KV cache blocks.

    This base class stores nothing. Subclasses override what they need. Methods that other threads may call say so.
    """

    def block_connectors(self, num_ranks: int) -> AbstractSequence[BlockConnector]:
        """Returns the connectors of the block managers, one for each data rank. They replace all earlier ones."""
        return [BlockConnector()] * num_ranks

    def begin(self, scheduler: Scheduler | DataRanksScheduler) -> None:
        """Called when the engine starts, or restarts after a failed step, with this scheduler and empty caches."""

    def fetches(self, params: SamplingParams) -> bool:  # noqa: ARG002
        """Returns whether `fetch` could find blocks for a request. Other threads may call it."""
        return False

    def fetch(
        self,
        prompt_token_ids: AbstractSequence[int],
        cache_salt: str | None,
        params: SamplingParams,
        deadline: Deadline | None = None,
    ) -> None:
        """Fetches the available blocks of a prompt that will be added soon; may take seconds.

        Other threads may call it while steps run, and end its deadline.
        """

    def check(self, params: SamplingParams) -> None:
        """Raises a RequestError for `kv_transfer_params` if the engine can neither take nor hand over blocks."""
        if params.kv_transfer is not None:
            raise RequestError("needs an engine with kv_transfer_config: leave it out", param="kv_transfer_params")

    def request_added(self, sequence: Sequence) -> None:
        """Called when the first sequence of a request was queued."""

    def step_dispatching(self, output: SchedulerOutput) -> None:
        """Called right before a step is dispatched."""

    def step_dispatched(self, output: SchedulerOutput) -> None:
        """Called right after a step's model was dispatched."""

    def step_read(self, output: SchedulerOutput) -> None:
        """Called when a step's tokens were read: it, and all steps before it, have succeeded."""

    def step_done(self) -> None:
        """Called after the engine has processed a step and may have scheduled the next ones."""

    def request_done(self, sequence: Sequence, *, answered: bool) -> dict[str, Any] | None:  # noqa: ARG002
        """Called when a request has ended.

        Args:
          sequence: First sequence of the request.
          answered: True if the request has ended by itself; False if it failed or was aborted.

        Returns:
          The `kv_transfer_params` of the request's output.
        """
        return None

    def idle(self) -> None:
        """Called when no step follows for a while."""

    @property
    def stats(self) -> dict[str, TierStats]:
        """Counters of each tier, by its name. Other threads may read them."""
        return {}

    def close(self) -> None:
        """Called when no step follows. May be called again."""
