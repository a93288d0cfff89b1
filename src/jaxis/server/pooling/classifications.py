"""Request and answer of /classify, with vLLM's fields."""

from __future__ import annotations

import time

import numpy as np
from pydantic import BaseModel

from jaxis.pooling.classifier_settings import ClassifierSettings
from jaxis.server.http.body import new_id
from jaxis.server.pooling.embeddings import Inputs
from jaxis.server.pooling.fields import PoolingUsage, ScoringRequest


class ClassificationRequest(ScoringRequest):
    """Texts to classify.

    Attributes:
      input: A string, token ids, or a list of strings or of lists of token ids.
    """

    input: Inputs


class Classification(BaseModel):
    """Best label of an input, and the scores of all labels."""

    index: int
    label: str
    probs: list[float]
    num_classes: int


class ClassificationResponse(BaseModel):
    """Classifications, in the order of the texts."""

    id: str
    object: str = "list"
    created: int
    model: str
    data: list[Classification]
    usage: PoolingUsage


def classification_response(
    scores: np.ndarray, classifier: ClassifierSettings, num_tokens: int, model: str
) -> ClassificationResponse:
    """Returns the answer.

    Args:
      scores: float32 [texts, labels].
      classifier: Settings of the model.
      num_tokens: Tokens of all texts.
      model: Served name of the model.
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
