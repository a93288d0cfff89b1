"""Choice of the features that the sampler's programs are compiled for: few, whatever requests ask for."""

from __future__ import annotations

import dataclasses
import functools

from jaxis.engine.execution.sampling_batch import SamplerFeatures

MAX_EXACT = 8  # programs for each number of rows that do just what a step needs


class CompiledFeatures:
    """Chooses the features of the program that samples a step.

    A program takes about three megabytes, and requests can combine features in hundreds of ways, for each of a dozen
    numbers of rows. Only the first MAX_EXACT combinations get a program of their own. From then on, a step takes a
    program that does what the step needs and more; the tokens are the same.
    """

    def __init__(self) -> None:
        self._chosen: dict[int, list[SamplerFeatures]] = {}  # by number of rows

    def choose(self, num_rows: int, features: SamplerFeatures) -> SamplerFeatures:
        """Returns the features of the program to use: those that the step needs, or more."""
        chosen = self._chosen.setdefault(num_rows, [])
        if features in chosen:
            return features
        if len(chosen) >= MAX_EXACT:
            covering = [other for other in chosen if other.covers(features)]
            if covering:
                return min(covering, key=_cost)
            features = functools.reduce(SamplerFeatures.join, chosen, features)
        chosen.append(features)
        return features


def _cost(features: SamplerFeatures) -> tuple[int, int]:
    """Returns a rough cost of features for a step, as a sort key: first passes over the vocabulary, then widths."""
    passes = [features.has_filters, features.allowed_width, features.mask_width, features.num_logprobs is not None]
    widths = [value for value in dataclasses.astuple(features) if type(value) is int]
    return sum(map(bool, passes)) + (not features.greedy_only), sum(widths)
