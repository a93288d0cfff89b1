"""The seam between an engine and what becomes of the blocks of its KV cache beyond its devices."""

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


@dataclass
class TierStats:
    """What one tier of blocks beyond the devices has done since the start.

    Attributes:
      saved_blocks, saved_bytes: Written to it; of other engines, sent to them.
      loaded_blocks, loaded_bytes: Found in it and read from it.
      missed_blocks: Full blocks of prompts that were looked for here and not found.
      failed_blocks: Not saved or loaded because of an error; each is computed anew when it is needed.
      used_bytes: What it holds.
    """

    saved_blocks: int = 0
    saved_bytes: int = 0
    loaded_blocks: int = 0
    loaded_bytes: int = 0
    missed_blocks: int = 0
    failed_blocks: int = 0
    used_bytes: int = 0


class KVConnector:
    """What an engine tells of its steps and requests to what keeps or follows the blocks of its KV cache.

    This one keeps nothing. Subclasses override what they need; those that other threads may call say so.
    """

    def block_connectors(self, num_ranks: int) -> AbstractSequence[BlockConnector]:
        """Those of the block managers, one for each data rank, that replace all earlier ones."""
        return [BlockConnector()] * num_ranks

    def begin(self, scheduler: Scheduler | DataRanksScheduler) -> None:
        """The engine begins, or begins anew after a step that failed, with this scheduler and empty caches."""

    def fetches(self, params: SamplingParams) -> bool:  # noqa: ARG002
        """Whether there is anything that `fetch` could fetch for a request. Other threads may call it."""
        return False

    def fetch(
        self,
        prompt_token_ids: AbstractSequence[int],
        cache_salt: str | None,
        params: SamplingParams,
        deadline: Deadline | None = None,
    ) -> None:
        """Fetches what there is of a prompt that is about to be added; may take seconds.

        Other threads may call it while steps run, and end its deadline.
        """

    def check(self, params: SamplingParams) -> None:
        """Raises a RequestError for `kv_transfer_params` where nothing can take or hand over blocks."""
        if params.kv_transfer is not None:
            raise RequestError("needs an engine with kv_transfer_config: leave it out", param="kv_transfer_params")

    def request_added(self, sequence: Sequence) -> None:
        """The first sequence of a request was queued."""

    def step_dispatching(self, output: SchedulerOutput) -> None:
        """The step is dispatched next."""

    def step_dispatched(self, output: SchedulerOutput) -> None:
        """The step's model was dispatched just now."""

    def step_read(self, output: SchedulerOutput) -> None:
        """The tokens of the step, and so of all before it, were read: none of them has failed."""

    def step_done(self) -> None:
        """The engine has taken in a step, and may have scheduled the next ones."""

    def request_done(self, sequence: Sequence, *, answered: bool) -> dict[str, Any] | None:  # noqa: ARG002
        """A request has ended.

        Args:
          sequence: Its first.
          answered: Whether it has ended by itself, rather than failed or been aborted.

        Returns:
          The `kv_transfer_params` of its output.
        """
        return None

    def idle(self) -> None:
        """No step is to follow for a while."""

    @property
    def stats(self) -> dict[str, TierStats]:
        """What each tier has done, by its name. Other threads may ask."""
        return {}

    def close(self) -> None:
        """No step follows. May be called again."""
