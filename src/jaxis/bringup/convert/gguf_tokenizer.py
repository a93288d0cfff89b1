"""A checkpoint's tokenizer as the keys of a GGUF file: the inverse of `jaxis.tokenizer.gguf`."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from jaxis.bringup.convert.gguf_file import GGUFValue
from jaxis.errors import CheckpointError
from jaxis.tokenizer import Tokenizer
from jaxis.tokenizer.byte_level import byte_level_backend
from jaxis.tokenizer.config import DEFAULT_TEMPLATE
from jaxis.tokenizer.gguf import END_OF_TURN_TOKENS, SPECIAL_TOKEN_KEYS, gguf_tokenizer
from jaxis.tokenizer.sentencepiece import WORD_START, derive_merges
from jaxis.tokenizer.sentencepiece_file import Piece, PieceType
from jaxis.tokenizer.split_rules import SPLIT_RULES

_PREFIX = "tokenizer.ggml."
_WHOLE = "tokenizer.huggingface.json"
# Strings in which tokenizers of the same vocabulary differ.
_PROBES = (
    *("", " ", "a", " a", "  a  b ", "\n\n a\t", "I'll say it's 12345.67 DON'T", "def f(x):\n    return x ** 2\r\n"),
    *(
        "Straße, naïve, e\u0301, \u1e9b\u0323",
        "Москва 東京 العربية हिन्दी ไทย",
        "😀 👩‍👩‍👧 🇫🇷",
        "zero\x00byte \ufeff\ufffd",
    ),
)


@dataclass(frozen=True)
class TokenizerKeys:
    """The tokenizer in a GGUF file; `notes` tell the user what its keys cannot express."""

    keys: dict[str, GGUFValue]
    notes: tuple[str, ...] = ()


def gguf_tokenizer_keys(
    tokenizer: Tokenizer, num_tokens: int, eos_token_ids: Collection[int], architecture: str, source: str
) -> TokenizerKeys:
    """Describes a tokenizer with GGUF's keys, and reads it back to see that it is the same.

    If the two differ on some string, the file gets tokenizer.json as well, which jaxis reads and llama.cpp does not.
    Each of the embedding's `num_tokens` rows without a token gets one that is never used.

    Raises:
      CheckpointError: GGUF cannot describe such a tokenizer, or llama.cpp does not know its way to split text.
    """
    described = json.loads(tokenizer.to_json())
    if tokenizer.vocab_size > num_tokens:
        raise CheckpointError(
            f"{source}: the tokenizer has {tokenizer.vocab_size} tokens and the embedding {num_tokens} rows: "
            "they are not of one model"
        )
    pieces = _pieces(described, num_tokens)
    if described["model"]["type"] != "BPE":
        raise CheckpointError(f"{source}: GGUF has no tokenizer of the kind {described['model']['type']}, only BPE")
    if described["model"].get("byte_fallback"):
        keys = _sentencepiece_keys(described, pieces, source)
    else:
        keys = _byte_level_keys(described, pieces, source)
    eos_token_ids = {token_id for token_id in eos_token_ids if token_id < num_tokens}
    keys |= _special_keys(tokenizer, eos_token_ids)
    keys |= _template_keys(tokenizer.chat_templates)
    notes = []
    if (text := _first_difference(tokenizer, keys, architecture, source)) is not None:
        keys[_WHOLE] = tokenizer.to_json()
        notes.append(
            f"llama.cpp will split some texts differently, such as {text!r}: GGUF has no key for what this tokenizer "
            "does there"
        )
    by_text = {tokenizer.token_to_id(text) for text in END_OF_TURN_TOKENS}
    if lost := set(eos_token_ids) - by_text - {value for key, value in keys.items() if key.endswith("_token_id")}:
        names = ", ".join(repr(tokenizer.token_text(token_id)) for token_id in sorted(lost))
        notes.append(f"the file does not say that an answer ends with {names}")
    return TokenizerKeys(keys, tuple(notes))


def _pieces(described: Mapping[str, Any], num_tokens: int) -> list[Piece]:
    texts = {token_id: text for text, token_id in described["model"]["vocab"].items()}
    unknown = described["model"].get("unk_token")
    added = {token["id"]: token for token in described["added_tokens"]}
    pieces = []
    for i in range(num_tokens):
        if i in added:
            text, kind = added[i]["content"], PieceType.CONTROL if added[i]["special"] else PieceType.USER_DEFINED
        elif i in texts:
            text, kind = texts[i], PieceType.NORMAL
        else:
            text, kind = f"[PAD{i}]", PieceType.UNUSED
        if text == unknown:
            kind = PieceType.UNKNOWN
        pieces.append(Piece(text, 0.0, kind))
    return pieces


def _vocabulary_keys(kind: str, pre: str, pieces: list[Piece]) -> dict[str, GGUFValue]:
    return {
        f"{_PREFIX}model": kind,
        f"{_PREFIX}pre": pre,
        f"{_PREFIX}tokens": [piece.text for piece in pieces],
        f"{_PREFIX}token_type": [int(piece.type) for piece in pieces],
    }


def _byte_level_keys(described: Mapping[str, Any], pieces: list[Piece], source: str) -> dict[str, GGUFValue]:
    split = _split(described)
    known = ((name, byte_level_backend({}, [], rules, source)) for name, rules in SPLIT_RULES.items())
    pre = next((name for name, backend in known if _split(json.loads(backend.to_str())) == split), None)
    if pre is None:
        raise CheckpointError(
            f"{source}: llama.cpp has no name for how this tokenizer splits text "
            f"({_one_line(described.get('pre_tokenizer'))}), and would give wrong tokens"
        )
    return _vocabulary_keys("gpt2", pre, pieces) | {f"{_PREFIX}merges": [" ".join(pair) for pair in _merges(described)]}


def _split(described: Mapping[str, Any]) -> tuple[object, ...]:
    """Returns how a tokenizer.json splits text; equal for files that split alike."""
    settings = ("pattern", "individual_digits", "use_regex", "add_prefix_space")
    steps = [
        (step["type"], _kept(step), *(step.get(name) for name in settings))
        for step in _steps(described.get("pre_tokenizer"), "pretokenizers")
    ]
    normalizers = [step["type"] for step in _steps(described.get("normalizer"), "normalizers")]
    return normalizers, steps, bool(described["model"].get("ignore_merges"))


def _kept(step: Mapping[str, Any]) -> object:
    """Returns how a step separates matches. Patterns that match all of any text leave nothing to remove."""
    kept = step.get("behavior"), step.get("invert")
    return ("Isolated", False) if kept == ("Removed", True) else kept


def _steps(step: Mapping[str, Any] | None, members: str) -> Iterator[Mapping[str, Any]]:
    if step is None:
        return
    if step["type"] == "Sequence":
        for member in step[members]:
            yield from _steps(member, members)
    else:
        yield step


def _merges(described: Mapping[str, Any]) -> list[tuple[str, str]]:
    pairs = (merge.split(" ") if isinstance(merge, str) else merge for merge in described["model"]["merges"])
    return [(left, right) for left, right in pairs]


def _sentencepiece_keys(described: Mapping[str, Any], pieces: list[Piece], source: str) -> dict[str, GGUFValue]:
    pieces = [Piece(piece.text, 0.0, PieceType.BYTE) if _is_byte(piece) else piece for piece in pieces]
    scores = _scores(pieces, _merges(described))
    if scores is None:
        raise CheckpointError(
            f"{source}: the tokenizer's merges are not those of a SentencePiece vocabulary, and GGUF has no others "
            "with byte fallback"
        )
    texts = [_with_spaces(piece) for piece in pieces]
    return _vocabulary_keys("llama", "default", texts) | {
        f"{_PREFIX}scores": scores,
        f"{_PREFIX}add_space_prefix": _adds_space_prefix(described),
        f"{_PREFIX}remove_extra_whitespaces": False,
    }


def _is_byte(piece: Piece) -> bool:
    return piece.type == PieceType.NORMAL and len(piece.text) == 6 and piece.text.startswith("<0x")


def _scores(pieces: list[Piece], merges: list[tuple[str, str]]) -> list[float] | None:
    """Returns scores that lead to these merges: by id, as SentencePiece's trainer numbers pieces, or by rank."""
    first_rank: dict[str, int] = {}
    for rank, (left, right) in enumerate(merges):
        first_rank.setdefault(left + right, rank)
    for scores in (
        [-float(i) for i in range(len(pieces))],
        [-float(first_rank.get(piece.text, len(merges))) for piece in pieces],
    ):
        scored = [Piece(piece.text, score, piece.type) for piece, score in zip(pieces, scores, strict=True)]
        if _same_merges(derive_merges(scored), merges, scored):
            return scores
    return None


def _same_merges(derived: list[tuple[str, str]], merges: list[tuple[str, str]], pieces: list[Piece]) -> bool:
    """Returns whether both merge alike. User-defined pieces are found before anything is merged."""
    defined = {piece.text for piece in pieces if piece.type == PieceType.USER_DEFINED}
    first, second = ([pair for pair in pairs if "".join(pair) not in defined] for pairs in (derived, merges))
    return first == second


def _with_spaces(piece: Piece) -> Piece:
    if piece.type == PieceType.USER_DEFINED and not piece.text.strip(WORD_START):
        return Piece(" " * len(piece.text), piece.score, piece.type)
    return piece


def _adds_space_prefix(described: Mapping[str, Any]) -> bool:
    steps = (*_steps(described.get("normalizer"), "normalizers"),)
    splits = (*_steps(described.get("pre_tokenizer"), "pretokenizers"),)
    return any(step["type"] == "Prepend" for step in steps) or any(
        step["type"] == "Metaspace" and step.get("prepend_scheme", "always") != "never" for step in splits
    )


def _special_keys(tokenizer: Tokenizer, eos_token_ids: Collection[int]) -> dict[str, GGUFValue]:
    keys: dict[str, GGUFValue] = {}
    for name, key in SPECIAL_TOKEN_KEYS.items():
        token_id = tokenizer.token_to_id(tokenizer.special_tokens.get(name, ""))
        if token_id is not None:
            keys[_PREFIX + key] = token_id
    named = tokenizer.eos_token_id
    ends = sorted(eos_token_ids, key=lambda token_id: (token_id != named, token_id))
    keys |= {
        _PREFIX + key: end for key, end in zip(("eos_token_id", "eot_token_id", "eom_token_id"), ends, strict=False)
    }
    plain, full = (tokenizer.encode("a", add_special_tokens=add) for add in (False, True))
    begin = next((i for i in range(len(full)) if full[i : i + len(plain)] == plain), 0)
    keys[f"{_PREFIX}add_bos_token"] = begin > 0
    keys[f"{_PREFIX}add_eos_token"] = len(full) > begin + len(plain)
    return keys


def _template_keys(templates: Mapping[str, str]) -> dict[str, GGUFValue]:
    keys: dict[str, GGUFValue] = {}
    others = {name: source for name, source in templates.items() if name != DEFAULT_TEMPLATE}
    if DEFAULT_TEMPLATE in templates:
        keys["tokenizer.chat_template"] = templates[DEFAULT_TEMPLATE]
    if others:
        keys["tokenizer.chat_templates"] = list(others)
    return keys | {f"tokenizer.chat_template.{name}": source for name, source in others.items()}


def _first_difference(
    tokenizer: Tokenizer, keys: Mapping[str, GGUFValue], architecture: str, source: str
) -> str | None:
    """Returns a string that the keys' tokenizer encodes to other tokens than the original; None if none is found."""
    backend, config = gguf_tokenizer({**keys, "general.architecture": architecture}, source)
    back = Tokenizer(backend, config)
    added = [token["content"] for token in json.loads(tokenizer.to_json())["added_tokens"]]
    probes = [*_PROBES, *(f"a{text}b {text} {text}\n{text}" for text in added[:64])]
    return next((text for text in probes if tokenizer.encode(text) != back.encode(text)), None)


def _one_line(step: object) -> str:
    text = json.dumps(step, ensure_ascii=False)
    return text if len(text) < 200 else text[:197] + "..."
