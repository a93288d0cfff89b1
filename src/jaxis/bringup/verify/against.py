"""Verifies a model against a server that serves it: both give log-probabilities of the same tokens.

Two probes tell causes apart. a plain string needs no template, so a difference there comes from the weights, their
quantization, or the tokenizer. A conversation differs alone if the template or the system prompt does.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import jax
import numpy as np

from jaxis.bringup.verify.compare import VerifyDType
from jaxis.bringup.verify.server_logprobs import LogprobServer, ServerToken
from jaxis.errors import ConfigError, RequestError
from jaxis.llm import LLM
from jaxis.tokenizer.tokenizer import Tokenizer

SCHEMA = 1
"""Version of the JSON of `AgainstResult.to_dict`; incremented when a field changes its meaning or is removed."""
ROUNDING = 0.06
"""Mean difference of log-probabilities, in nats, that types of 16 bits explain: 0.036 in vLLM with Gemma 3 270M."""
QUANTIZATION = 0.5
"""Mean difference, in nats, that another quantization of the same weights explains."""
ANSWER_TOKENS = 32
_TEXT = (
    "The lighthouse at the northern end of the island was built in 1874, after two ships had been lost on the rocks in "
    "a single winter. Its keeper lived there with his family until 1962, when the light was automated. Today the tower "
    "is a museum: 154 steps lead to the lamp room, from which, on a clear day, you can see the mainland. Tickets cost "
    "5 euros; children under 12 enter free. def area(radius): return 3.14159 * radius ** 2"
)
_MESSAGES = (
    {"role": "user", "content": "Name three primary colors, and say in one sentence what they have in common."},
)
_MAX_LENGTH = 1024  # tokens; the probes take a few hundred

FindingCode = Literal["tokenizer", "template", "quantization", "weights", "no_prompt_logprobs", "no_template"]


@dataclass(frozen=True)
class Finding:
    """One cause of a difference, or one thing that could not be compared, in a sentence."""

    code: FindingCode
    message: str


@dataclass(frozen=True)
class AgainstCheck:
    """Log-probabilities of one probe's tokens.

    Attributes:
      probe: "text", or "chat".
      mean_difference, max_difference: Absolute differences from the server's log-probabilities, in nats.
      argmax_agreement: Share of the tokens that the server generated which are jaxis's most likely ones, too; None for
        a string that was scored.
    """

    probe: Literal["text", "chat"]
    num_tokens: int
    mean_difference: float
    max_difference: float
    argmax_agreement: float | None

    @property
    def passed(self) -> bool:
        return self.mean_difference <= ROUNDING


@dataclass(frozen=True)
class AgainstResult:
    """Results of all probes."""

    model: str
    url: str
    server_model: str
    dtype: str
    checks: tuple[AgainstCheck, ...]
    findings: tuple[Finding, ...]

    @property
    def passed(self) -> bool:
        return all(check.passed for check in self.checks) and all(
            finding.code.startswith("no_") for finding in self.findings
        )

    def to_dict(self) -> dict[str, Any]:
        """Returns the result as JSON values, described in docs/bring-up.md."""
        status = "verified" if self.passed else "differs"
        found = {"schema": SCHEMA, "status": status, **dataclasses.asdict(self)}
        for check, values in zip(self.checks, found["checks"], strict=True):
            values["passed"] = check.passed
        return found


def verify_against(
    model: str,
    url: str,
    *,
    server_model: str = "",
    api_key: str = "",
    dtype: VerifyDType = "float32",
    on_stage: Callable[[str], None] = lambda _: None,
) -> AgainstResult:
    """Compares a model's log-probabilities with those of a server.

    Args:
      model: Folder, GGUF file or Hub id that jaxis loads.
      url: Server's address.
      server_model: Name of the model there; empty is the first that the server lists.
      api_key: Server's key; empty sends none.
      dtype: Type in which jaxis computes.
      on_stage: Called with a short description of each stage as it begins.

    Raises:
      ConfigError: The server cannot be reached or gives no log-probabilities; or the model cannot be loaded.
    """
    with LogprobServer(url, model=server_model, api_key=api_key) as server:
        on_stage("loading")
        with LLM(model, dtype=dtype, max_model_len=_MAX_LENGTH, max_num_seqs=1, show_progress=False) as llm:
            tokenizer = llm.tokenizer
            if tokenizer is None:
                raise ConfigError(f"{model} has no tokenizer, and the server's tokens are told by their text")
            comparison = _Comparison(llm, tokenizer, server)
            on_stage("comparing a string")
            comparison.compare_text()
            on_stage("comparing an answer")
            comparison.compare_chat()
        return AgainstResult(
            model, server.url, server.model, dtype, tuple(comparison.checks), tuple(comparison.findings)
        )


class _Comparison:
    """Checks and findings, as the probes go on."""

    def __init__(self, llm: LLM, tokenizer: Tokenizer, server: LogprobServer) -> None:
        self._llm = llm
        self._tokenizer = tokenizer
        self._server = server
        self._id_of_text: dict[bytes, int] = {}
        # A token of one byte stands last: tokenizers use it only where no other has the text.
        for _, token_id in sorted(tokenizer.vocabulary.items(), key=lambda item: (item[0].startswith("<0x"), item[1])):
            self._id_of_text.setdefault(tokenizer.token_bytes(token_id), token_id)
        self.checks: list[AgainstCheck] = []
        self.findings: list[Finding] = []

    def compare_text(self) -> None:
        """Compares the log-probabilities of a string, or where the server cannot score one, of its continuation."""
        token_ids = self._tokenizer.encode(_TEXT)
        theirs = self._server.tokenize(_TEXT)
        if theirs is not None and theirs != token_ids:
            here, there = ([f"{i} ({self._text([i])!r})" for i in ids] + ["nothing"] for ids in (token_ids, theirs))
            place = next(i for i, pair in enumerate(zip(here, there, strict=False)) if pair[0] != pair[1])
            message = f"token {place} of the text is {there[place]} there and {here[place]} here"
            self._find("tokenizer", f"{message}: another tokenizer, or other special tokens around a prompt")
            return
        scored = self._server.score(_TEXT)
        if scored is None:
            message = "the server does not score prompts: the continuation of a string was compared instead"
            self._find("no_prompt_logprobs", message)
            answer = self._server.complete(_TEXT, ANSWER_TOKENS)
            if answer.num_prompt_tokens not in (None, len(token_ids)):
                self._find(
                    "tokenizer",
                    f"the text is {answer.num_prompt_tokens} tokens there and {len(token_ids)} here: another "
                    "tokenizer, or other special tokens around a prompt",
                )
            self._compare("text", token_ids, answer.tokens)
            return
        tokens = scored.tokens
        difference = len(tokens) - len(token_ids)
        place = self._first_other_token(token_ids, tokens)
        if place is not None:
            here = repr(self._tokenizer.token_text(token_ids[place])) if place < len(token_ids) else "nothing"
            there = repr(tokens[place].text.decode(errors="replace")) if place < len(tokens) else "nothing"
            self._find(
                "tokenizer",
                f"token {place} of the text is {there} there and {here} here ({difference:+d} tokens there): another "
                "tokenizer, or other special tokens around a prompt",
            )
            return
        self._add_check("text", token_ids, range(1, len(token_ids)), tokens[1:], is_scored=True)

    def compare_chat(self) -> None:
        """Compares the log-probabilities of an answer to a conversation."""
        try:
            rendered = self._llm.render_chat(_MESSAGES)
        except RequestError as error:
            self._find("no_template", f"no answer was compared: {error}")
            return
        answer = self._server.chat(_MESSAGES, ANSWER_TOKENS)
        theirs = self._server.rendered_chat(_MESSAGES)
        if theirs is not None:
            ours = rendered.prompt_token_ids if isinstance(theirs, list) else rendered.prompt
            # The text may lack the token that begins a sequence, which the server adds.
            if theirs != ours and not (isinstance(theirs, str) and rendered.prompt.endswith(theirs)):
                self._find("template", f"the prompt is {_first_difference(self._text(theirs), self._text(ours))}")
        elif answer.num_prompt_tokens not in (None, len(rendered.prompt_token_ids)):
            self._find(
                "template",
                f"the prompt is {answer.num_prompt_tokens} tokens there and {len(rendered.prompt_token_ids)} here: "
                "another template, or a system prompt",
            )
        self._compare("chat", rendered.prompt_token_ids, answer.tokens)

    def _compare(self, probe: Literal["text", "chat"], prompt: Sequence[int], tokens: Sequence[ServerToken]) -> None:
        """Compares a generated answer, up to its first token that jaxis does not know."""
        token_ids = list(prompt)
        for token in tokens:
            token_id = self._id_of_text.get(token.text) if token.token_id is None else token.token_id
            if token_id is None:
                break
            token_ids.append(token_id)
        known = tokens[: len(token_ids) - len(prompt)]
        if not known:
            self._find("tokenizer", f"the server's first token {tokens[0].text!r} is none of this tokenizer's")
            return
        self._add_check(probe, token_ids, range(len(prompt), len(token_ids)), known, is_scored=False)

    def _add_check(
        self,
        probe: Literal["text", "chat"],
        token_ids: Sequence[int],
        positions: range,
        tokens: Sequence[ServerToken],
        *,
        is_scored: bool,
    ) -> None:
        logits = self._llm.compute_logits(token_ids)[positions.start - 1 : positions.stop - 1]
        logprobs = np.asarray(jax.nn.log_softmax(logits, axis=-1))
        chosen = np.asarray([token_ids[position] for position in positions])
        ours = logprobs[np.arange(len(chosen)), chosen]
        differences = np.abs(ours - [np.inf if token.logprob is None else token.logprob for token in tokens])
        agreement = None if is_scored else float((logprobs.argmax(-1) == chosen).mean())
        check = AgainstCheck(probe, len(tokens), float(differences.mean()), float(differences.max()), agreement)
        self.checks.append(check)
        known = {finding.code for finding in self.findings}
        if check.passed or known & {"tokenizer", "template", "quantization", "weights"}:
            return
        mean = f"log-probabilities differ by {check.mean_difference:.2g} on average"
        if probe == "chat" and self.checks[0].passed:
            self._find("template", f"{mean} in an answer, and not in a string: another template, or a system prompt")
        elif check.mean_difference <= QUANTIZATION:
            self._find("quantization", f"{mean}: as another quantization or cache type of the same weights does")
        else:
            self._find("weights", f"{mean}: other weights, an adapter, or a wrong computation on one side")

    def _first_other_token(self, token_ids: Sequence[int], tokens: Sequence[ServerToken]) -> int | None:
        """Returns the first place with another token there; a special token, which may have no text there, matches."""
        for place, (token_id, token) in enumerate(zip(token_ids, tokens, strict=False)):
            texts = {self._tokenizer.token_bytes(token_id), self._tokenizer.decode([token_id]).encode()}
            is_special = not self._tokenizer.decode([token_id])
            if token.text not in texts and not is_special:
                return place
        return min(len(token_ids), len(tokens)) if len(token_ids) != len(tokens) else None

    def _text(self, prompt: Sequence[int] | str) -> str:
        return prompt if isinstance(prompt, str) else self._tokenizer.decode(prompt, skip_special_tokens=False)

    def _find(self, code: FindingCode, message: str) -> None:
        self.findings.append(Finding(code, message))


def _first_difference(there: str, here: str) -> str:
    place = next((i for i, (a, b) in enumerate(zip(there, here, strict=False)) if a != b), min(len(there), len(here)))
    start = max(0, place - 10)
    return f"{there[start : place + 30]!r} there and {here[start : place + 30]!r} here, from character {start} on"
