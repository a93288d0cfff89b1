"""Vectors as clients of Ollama and of llama-server ask for them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, Field

from jaxis.errors import RequestError
from jaxis.pooling.client.async_pooling import MAX_TEXTS
from jaxis.server.http.body import LenientModel, NotApplied
from jaxis.server.ollama.ollama_schema import OllamaOptions
from jaxis.server.pooling.embeddings import Inputs
from jaxis.server.pooling.fields import PoolingRequest


class OllamaEmbedRequest(LenientModel):
    """/api/embed.

    Attributes:
      input: A string, or some; none, or an empty one, only loads the model.
      truncate: Whether a string that is too long is cut; none cuts it.
      dimensions: How many elements to return, of a model that was trained to have vectors cut.
      keep_alive: No effect: the model stays loaded.
    """

    model: str | None = None
    input: str | Annotated[list[str], Field(max_length=MAX_TEXTS)] | None = None
    truncate: bool | None = None
    dimensions: Annotated[int, Field(ge=1)] | None = None
    options: OllamaOptions | None = None
    keep_alive: str | float | None = None


class OllamaEmbeddings(BaseModel):
    """/api/embed's answer; durations in nanoseconds."""

    model: str
    embeddings: list[list[float]]
    total_duration: int
    load_duration: int = 0
    prompt_eval_count: int


class OllamaEmbeddingRequest(LenientModel):
    """/api/embeddings, which takes one string; see `OllamaEmbedRequest`."""

    model: str | None = None
    prompt: str = ""
    options: OllamaOptions | None = None
    keep_alive: str | float | None = None


class OllamaEmbedding(BaseModel):
    """/api/embeddings' answer."""

    embedding: list[float]


class LlamaEmbeddingRequest(PoolingRequest):
    """/embedding of llama-server.

    Attributes:
      content, input: One of them: a string, token ids, or a list of strings or of lists of token ids.
    """

    not_applied: ClassVar[Mapping[str, Any]] = {
        **PoolingRequest.not_applied,
        "embd_normalize": NotApplied((2,), "the checkpoint's own settings are used: leave it out"),
    }

    content: Inputs | None = None
    input: Inputs | None = None

    def given(self) -> tuple[str, Inputs]:
        """The field that has the texts, and these.

        Raises:
          RequestError: None has, or both.
        """
        if (self.content is None) == (self.input is None):
            raise RequestError(
                "is missing" if self.content is None else "and input are the same: send one", param="content"
            )
        return ("content", self.content) if self.content is not None else ("input", self.input or "")


class LlamaEmbedding(BaseModel):
    """An input's vector, which is a list of one: llama-server has one a token where nothing is pooled."""

    index: int
    embedding: list[list[float]]
