"""Ways of asking that fit any relation: a frame around the name of what is asked for.

They let the model meet each wording with many kinds of facts, so that it learns to look at what is asked for and not
at the sentence around it. No frame with its phrase is a held-out phrasing.
"""

from tiny.relations import SUM_CATEGORIES
from tiny.tables import PHRASINGS

_FRAMES = PHRASINGS["frames"]


def framed_templates(category: str) -> tuple[str, ...]:
    """Every question template that the frames make for a relation."""
    frames = _FRAMES["sum_frames" if category in SUM_CATEGORIES else "frames"]
    made = tuple(frame.replace("{phrase}", phrase) for frame in frames for phrase in _FRAMES["phrases"][category])
    return (*made, *_FRAMES["own_frames"].get(category, ()))
