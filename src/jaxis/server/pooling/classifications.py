"""/classify: its request and its answer, with vLLM's fields."""

from __future__ import annotations

import time

import numpy as np
from pydantic import BaseModel

from jaxis.pooling.classifier_settings import ClassifierSettings
from jaxis.server.http.body import new_id
from jaxis.server.pooling.embeddings import Inputs
from jaxis.server.pooling.fields import PoolingUsage, ScoringRequest


class ClassificationRequest(ScoringRequest):
    """Texts.

    Attributes:
      input: A string, token ids, or a list of strings or of lists of token ids.
    """

    input: Inputs


class Classification(BaseModel):
    """An input's label, and the score of each."""

    index: int
    label: str
    probs: list[float]
    num_classes: int


class ClassificationResponse(BaseModel):
    """All of them, in the order of the texts."""

    id: str
    object: str = "list"
    created: int
    model: str
    data: list[Classification]
    usage: PoolingUsage


def classification_response(
    scores: np.ndarray, classifier: ClassifierSettings, num_tokens: int, model: str
) -> ClassificationResponse:
    """The answer.

    Args:
      scores: float32 [texts, labels].
      classifier: The model's.
      num_tokens: Of all texts.
      model: Its served name.
    """
    return ClassificationResponse(
        id=new_id("classify"),
        created=int(time.time()),
        model=model,
        data=[
            Classification(
                index=index, label=classifier.labels[int(row.argmax())], probs=row.tolist(), num_classes=len(row)
            )
            for index, row in enumerate(scores)
        ],
        usage=PoolingUsage.of(num_tokens),
    )
