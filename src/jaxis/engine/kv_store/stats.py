"""What the tiers of a store have done since the start."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class TierStats:
    """One tier's counters.

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
