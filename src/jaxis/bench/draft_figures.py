"""Counts of drafts in a benchmark, as JSON values under vLLM's names and as a line of text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from jaxis.engine.drafting.draft_counts import DraftCounts

if TYPE_CHECKING:
    from jaxis.engine.engine import LLMEngine


_MAX_POSITIONS = 8


def draft_counts(engine: LLMEngine, *, since: DraftCounts | None = None) -> DraftCounts | None:
    """Copies an engine's counts, or returns the difference from such a copy; None if nothing drafts."""
    counts = engine.speculation.counts
    return None if counts is None else counts.since(since or DraftCounts())


def draft_figures(counts: DraftCounts | None) -> dict[str, Any]:
    """Returns the figures; none if nothing drafts. Shares are percentages, and None if there were no drafts."""
    if counts is None:
        return {}
    drafts, tokens, accepted = counts.num_drafts, counts.num_draft_tokens, counts.num_accepted_tokens
    return {
        "spec_decode_num_drafts": drafts,
        "spec_decode_draft_tokens": tokens,
        "spec_decode_accepted_tokens": accepted,
        "spec_decode_acceptance_rate": 100 * accepted / tokens if tokens else None,
        "spec_decode_acceptance_length": 1 + accepted / drafts if drafts else None,
        "spec_decode_per_position_acceptance_rates": [
            number / drafts for number in counts.num_accepted_by_position if drafts
        ],
    }


def format_drafts(report: Mapping[str, Any]) -> str | None:
    """Describes these figures of a report in one line; returns None if it has none."""
    drafts = report.get("spec_decode_num_drafts")
    if drafts is None:
        return None
    if drafts == 0:
        return "none were made"
    positions = report["spec_decode_per_position_acceptance_rates"]
    shares = " ".join(f"{share:.2f}" for share in positions[:_MAX_POSITIONS])
    return (
        f"{drafts} of {report['spec_decode_draft_tokens'] / drafts:.1f} tokens, "
        f"{report['spec_decode_acceptance_rate']:.0f}% of them right; "
        f"mean acceptance length {report['spec_decode_acceptance_length']:.2f}; "
        f"right up to position 1, 2, ...: {shares}{' ...' if len(positions) > _MAX_POSITIONS else ''}"
    )
