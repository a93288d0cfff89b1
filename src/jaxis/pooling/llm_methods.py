"""What `LLM` does with a model that makes vectors or scores of texts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxis.errors import RequestError
from jaxis.host.interrupt import interrupt_deferred
from jaxis.outputs import (
    ClassificationOutput,
    ClassificationRequestOutput,
    EmbeddingOutput,
    EmbeddingRequestOutput,
    ScoringOutput,
    ScoringRequestOutput,
)
from jaxis.pooling.embedder import Embedder
from jaxis.pooling.pairs import Texts, as_texts
from jaxis.prompts import Prompt, as_prompt_list, check_tokenization_kwargs


class PoolingMethods:
    """Vectors and scores of texts; `LLM`, which opens the model, inherits them."""

    _embedder: Embedder | None

    def _check_open(self) -> None:
        raise NotImplementedError

    @property
    def _pooler(self) -> Embedder:
        self._check_open()
        if self._embedder is None:
            raise RequestError("this model generates text: LLM(model, runner='pooling') makes vectors with it")
        return self._embedder

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        truncate_prompt_tokens: int | None = None,
        prompt_name: str | None = None,
        use_tqdm: bool | Callable[..., Any] | None = None,
        lora_request: object = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
    ) -> list[EmbeddingRequestOutput]:
        """The vectors of texts. On CPU, an input's is the same, bit for bit, whatever texts are beside it.

        Args:
          prompts: One or many texts, as in `generate`.
          truncate_prompt_tokens: How many tokens are left of a longer input; -1 is as many as the model takes. None: an
            input that is too long is an error.
          prompt_name: The kind of text, such as "query", for which the checkpoint has words to put before it.
          use_tqdm: vLLM's; without an effect.
          lora_request: vLLM's; must be None.
          tokenization_kwargs: vLLM's; must be empty.

        Returns:
          One output an input, in their order.

        Raises:
          RequestError: An input is empty or too long, an argument cannot be honoured, or the model generates text;
            nothing was computed.
        """
        del use_tqdm
        _check_no_adapter(lora_request)
        check_tokenization_kwargs(tokenization_kwargs)
        if self._pooler.classifier is not None:
            raise RequestError("this model makes scores and no vectors: use classify or score")
        with interrupt_deferred():
            found = self._pooler.embed(
                as_prompt_list(prompts), truncate_tokens=truncate_prompt_tokens, kind=prompt_name
            )
        return [
            EmbeddingRequestOutput(str(number), EmbeddingOutput(each.vector.tolist()), each.token_ids, each.prompt)
            for number, each in enumerate(found)
        ]

    def classify(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        truncate_prompt_tokens: int | None = None,
        use_activation: bool = True,
        use_tqdm: bool | Callable[..., Any] | None = None,
        lora_request: object = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
    ) -> list[ClassificationRequestOutput]:
        """The score of each label, for texts. On CPU, an input's are the same, bit for bit, whatever is beside it.

        Args:
          prompts: One or many texts, as in `generate`.
          truncate_prompt_tokens: See `embed`.
          use_activation: Make probabilities of logits: a sigmoid of one label, a softmax of several, or what the
            checkpoint's config.json asks for.
          use_tqdm: vLLM's; without an effect.
          lora_request: vLLM's; must be None.
          tokenization_kwargs: vLLM's; must be empty.

        Returns:
          One output an input, in their order.

        Raises:
          RequestError: See `embed`; also, the model is no classifier.
        """
        del use_tqdm
        _check_no_adapter(lora_request)
        check_tokenization_kwargs(tokenization_kwargs)
        classifier = self._pooler.classifier
        if classifier is None:
            raise RequestError("this model makes vectors and has no labels: use embed, or a checkpoint of a classifier")
        with interrupt_deferred():
            found = self._pooler.embed(as_prompt_list(prompts), truncate_tokens=truncate_prompt_tokens)
        return [
            ClassificationRequestOutput(
                str(number),
                ClassificationOutput(classifier.scores(each.vector[None], use_activation=use_activation)[0].tolist()),
                each.token_ids,
                each.prompt,
            )
            for number, each in enumerate(found)
        ]

    def score(
        self,
        data_1: Texts,
        data_2: Texts,
        /,
        *,
        truncate_prompt_tokens: int | None = None,
        use_activation: bool = True,
        instruction: str | None = None,
        use_tqdm: bool | Callable[..., Any] | None = None,
        lora_request: object = None,
    ) -> list[ScoringRequestOutput]:
        """How well texts go together: by a cross-encoder that reads both, or by the cosine of their vectors.

        Args:
          data_1: A string, which goes with each of `data_2`, or as many as there; such as queries.
          data_2: One string or many; such as documents. Dicts with a "text" will do, too.
          truncate_prompt_tokens: See `embed`. Of a pair that a cross-encoder reads, the second text is cut.
          use_activation: See `classify`.
          instruction: What to look for, of a model that gets it in words, such as Qwen3-Reranker; None is its card's.
          use_tqdm: vLLM's; without an effect.
          lora_request: vLLM's; must be None.

        Returns:
          One output a pair, in their order.

        Raises:
          RequestError: See `embed`; also, the lists' lengths differ, or the model is a classifier of several labels.
        """
        del use_tqdm
        _check_no_adapter(lora_request)
        first, second = as_texts(data_1, "data_1"), as_texts(data_2, "data_2")
        with interrupt_deferred():
            found = self._pooler.score(
                first,
                second,
                truncate_tokens=truncate_prompt_tokens,
                use_activation=use_activation,
                instruction=instruction,
            )
        return [
            ScoringRequestOutput(str(number), ScoringOutput(score), token_ids)
            for number, (score, token_ids) in enumerate(found)
        ]


def _check_no_adapter(lora_request: object) -> None:
    if lora_request is not None:
        raise RequestError("lora_request is not supported by models that make vectors or scores: merge the adapter")
