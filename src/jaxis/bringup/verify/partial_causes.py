"""Causes of a divergence that the places of the wrong values show: experts, heads or positions."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from jaxis.bringup.verify.cause import Cause
from jaxis.bringup.verify.recording import ChosenExperts, ModuleCall

_LEAST_RIGHT = 3  # tokens
_LEAST_FEATURES = 8  # that one factor must explain


def causes_in_parts(ours: np.ndarray, theirs: np.ndarray, call: ModuleCall | None, limit: float) -> Iterator[Cause]:
    """Yields the cause that arrays [T, ...] show; `call` is the reference's of the module whose output they are."""
    ours, theirs = ours.reshape(len(ours), -1), theirs.reshape(len(theirs), -1)
    limit *= float(np.abs(theirs).max())
    is_right = np.abs(ours - theirs).max(1) <= limit
    routing = None if call is None else call.inputs.routing
    num_right = int(is_right.argmin())
    if (num_others := _other_choices(ours, theirs, is_right)) is not None:
        message = f"the reference chooses other experts for {num_others} of {len(ours)} tokens, with the same weights"
        yield Cause("expert_choice", f"{message} where it chooses the same: by a bias of the choice, or by groups")
    elif routing is not None and (experts := _wrong_experts(routing, is_right)):
        yield Cause("some_experts", f"it is off for the tokens of experts {', '.join(map(str, experts))} and no others")
    elif (found := _factors(ours, theirs, limit)) is not None:
        size, low, high = found
        features = "" if size == ours.shape[1] else f" and {size} features"
        message = f"the reference's is jaxis's times a factor for each token{features}, {low:.3g} to {high:.3g}"
        yield Cause("factors", message + (": as of attention sinks, or of a gate" if features and high < 1 else ""))
    elif num_right >= _LEAST_RIGHT and not is_right[num_right:].any():
        yield Cause("from_position", f"it is right for positions below {num_right} and off from there on")


def _other_choices(ours: np.ndarray, theirs: np.ndarray, is_right: np.ndarray) -> int | None:
    """Counts the tokens with other nonzero weights; None if that is not all that differs in weights of few experts."""
    chosen = ours != 0, theirs != 0
    counts = {int(count) for each in chosen for count in each.sum(1)}
    is_same = (chosen[0] == chosen[1]).all(1)
    if len(counts) > 1 or counts == {ours.shape[1]} or is_same.sum() < _LEAST_RIGHT or (is_same != is_right).any():
        return None
    return int((~is_same).sum())


def _wrong_experts(routing: ChosenExperts, is_right: np.ndarray) -> list[int]:
    """Returns the experts all of whose tokens are wrong, if they are some and no other token is."""
    good, used = set(routing.expert_ids[is_right].flat), set(routing.expert_ids.flat)
    wrong = used - good
    explained = np.isin(routing.expert_ids, list(wrong)).any(1)
    return sorted(map(int, wrong)) if good and (explained == ~is_right).all() else []


def _factors(ours: np.ndarray, theirs: np.ndarray, limit: float) -> tuple[int, float, float] | None:
    """Returns the number of features that share a factor, at most, and the least and largest factor; None without."""
    width = ours.shape[1]
    for size in (size for size in range(width, _LEAST_FEATURES - 1, -1) if width % size == 0):
        a, b = (array.reshape(len(array), -1, size).astype(np.float64) for array in (ours, theirs))
        factors = (a * b).sum(-1) / np.maximum((a * a).sum(-1), 1e-30)
        if (np.abs(factors[..., None] * a - b) <= limit).all():
            return size, float(factors.min()), float(factors.max())
    return None
