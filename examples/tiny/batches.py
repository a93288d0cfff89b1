"""Training batches: samples of the corpus packed into rows of a few fixed lengths."""

import itertools
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
from tokenizers import Tokenizer

from tiny.corpus import Stage, conversation, draw
from tiny.tokenizer import END_OF_TEXT, answer_mask, sample_text

# Row lengths in tokens. Attention costs the square of the length, so each sample goes to the shortest row.
ROW_LENGTHS = (128, 256, 1024)
_OPEN_ROWS = 12
# (until this many samples, the stage). A model that sees few facts at first finds out sooner how to look one up, and
# then learns the others faster (arXiv:2503.21676).
_CURRICULUM = (
    (6_000, Stage(stride=8)),
    (10_000, Stage(stride=4)),
    (14_000, Stage(stride=2)),
    (28_000, Stage()),
    (math.inf, Stage(slow=2.0)),
)


@dataclass(frozen=True)
class Batch:
    """Rows of one length.

    Attributes:
        ids: token ids, int32 [N, L].
        weights: weight of the loss on predicting each token, float32 [N, L]; 0 for padding.
    """

    ids: np.ndarray
    weights: np.ndarray


@dataclass
class _Bucket:
    """Rows of one length that are being filled."""

    length: int
    rows: list[tuple[list[int], list[float]]] = field(default_factory=list)

    def add(self, ids: list[int], weights: list[float]) -> None:
        for row_ids, row_weights in self.rows[-_OPEN_ROWS:]:
            if len(row_ids) + len(ids) <= self.length:
                row_ids.extend(ids)
                row_weights.extend(weights)
                return
        self.rows.append((list(ids), list(weights)))

    def take(self, count: int, pad: int) -> Batch:
        taken, self.rows = self.rows[:count], self.rows[count:]
        ids = np.full((count, self.length), pad, np.int32)
        weights = np.zeros((count, self.length), np.float32)
        for row, (row_ids, row_weights) in enumerate(taken):
            ids[row, : len(row_ids)] = row_ids
            weights[row, : len(row_weights)] = row_weights
        return Batch(ids, weights)


def batches(
    tokenizer: Tokenizer,
    seed: int,
    *,
    tokens_per_batch: int = 4096,
    prompt_weight: float = 0.1,
    long_chats: float = 0.002,
) -> Iterator[Batch]:
    """Endless batches of `tokens_per_batch` tokens, the same for the same seed.

    Args:
        tokenizer: of the model.
        seed: of everything that is drawn.
        tokens_per_batch: rows times their length.
        prompt_weight: loss weight of what the user and the system say; the assistant's words and documents weigh 1.
        long_chats: share of samples that are chats of many turns, for the longest rows.
    """
    rng = random.Random(seed)
    pad = tokenizer.token_to_id(END_OF_TEXT)
    buckets = [_Bucket(length) for length in ROW_LENGTHS]
    for drawn in itertools.count(0, 256):
        stage = next(stage for until, stage in _CURRICULUM if drawn < until)
        samples = [
            conversation(rng, rng.randint(12, 30), stage) if rng.random() < long_chats else draw(rng, 2, stage)
            for _ in range(256)
        ]
        for encoding in tokenizer.encode_batch([sample_text(sample) for sample in samples]):
            ids = encoding.ids[: ROW_LENGTHS[-1]]
            weights = [1.0 if answer else prompt_weight for answer in answer_mask(tokenizer, ids)]
            next(bucket for bucket in buckets if len(ids) <= bucket.length).add(ids, weights)
        for bucket in buckets:
            count = tokens_per_batch // bucket.length
            while len(bucket.rows) >= count + _OPEN_ROWS:
                yield bucket.take(count, pad)
