"""A checkpoint's tokenizer, run by the `tokenizers` library.

transformers is not needed: importing it takes seconds and loads torch. A tokenizer.json is taken as it stands, for
every family. transformers 5 rebuilds LlamaTokenizer and Qwen2Tokenizer from vocabulary and merges with fixed text
rules. For files with those same rules (all of Qwen2, 2.5 and 3, and any that transformers 5 saved) that makes no
difference. For older Llama 2 files, it drops the word-start mark in two places where the model was trained with it:
before a string that begins with a space, and after a special token inside the string.

One flag is not taken as it stands: under a normalizer that prepends a word start, special tokens are not `normalized`.
The oldest Llama 2 files say that they are, by which `<s>` inside a chat would be three tokens; here, as with
LlamaTokenizer, it is one.
"""

from __future__ import annotations

import codecs
import copy
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers.decoders import Decoder
from tokenizers.normalizers import Normalizer

from jaxis.errors import CheckpointError, ContextLengthError, RequestError
from jaxis.tokenizer.byte_level import BYTE_OF_CHARACTER
from jaxis.tokenizer.chat_template import render_chat_template
from jaxis.tokenizer.checkpoint_tokenizer import read_checkpoint_tokenizer
from jaxis.tokenizer.config import ADDED_TOKEN_FLAGS, DEFAULT_TEMPLATE, TokenizerConfig
from jaxis.tokenizer.length_bound import LengthBound

# With each of these, a token adds the same text everywhere except at the start.
_DECODERS = {"ByteLevel", "ByteFallback", "Fuse", "Metaspace", "Replace", "Sequence", "Strip", "WordPiece"}
_REPLACE_EACH_BYTE = "jaxis-replace-each-byte"
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class Tokenizer:
    """Encodes text to token ids and decodes them, as transformers' tokenizer of the same folder does.

    Attributes:
      special_tokens: Name, such as "bos_token" -> the token's text.
      special_token_ids: Ids that `skip_special_tokens` leaves out.
      stop_token_ids: Ids that end an answer, where the tokenizer's own file tells them, as GGUF does.
      chat_templates: Name -> Jinja source.
    """

    def __init__(self, backend: tokenizers.Tokenizer, config: TokenizerConfig | None = None) -> None:
        config = config or TokenizerConfig()
        backend.no_truncation()
        backend.no_padding()
        backend.encode_special_tokens = config.split_special_tokens
        _register_special_tokens(backend, config)
        self._backend = backend
        self._clean_up_spaces = config.clean_up_tokenization_spaces and type(backend.model).__name__ != "BPE"
        self.special_tokens = {name: token.content for name, token in config.special_tokens.items()}
        self.special_token_ids = frozenset(
            token_id for token_id, token in backend.get_added_tokens_decoder().items() if token.special
        )
        self.stop_token_ids = config.stop_token_ids
        self.chat_templates = config.chat_templates
        decoders = _component_types(backend.decoder)
        if unknown := decoders - _DECODERS:
            raise CheckpointError(
                f"tokenizer.json has the decoder {min(unknown)}; supported: {', '.join(sorted(_DECODERS))}"
            )
        self._byte_level = "ByteLevel" in decoders
        self._byte_fallback = "ByteFallback" in decoders
        self._bytes_of_token: dict[int, bytes] = {}
        self._limit: tuple[LengthBound, int, bool] | None = None
        self._context_id = next(reversed(backend.encode("a", add_special_tokens=False).ids), None)

    @classmethod
    def from_path(cls, path: str | Path) -> Tokenizer | None:
        """Reads the tokenizer of a checkpoint, a folder or a GGUF file; None if it has none.

        Raises CheckpointError if a file is broken, or the tokenizer is not supported.
        """
        found = read_checkpoint_tokenizer(Path(path))
        return None if found is None else cls(*found)

    def limited_to(self, max_model_len: int, *, may_grow: bool = True) -> Tokenizer:
        """Returns this tokenizer for a model's prompts: `encode` refuses too long prompts before it reads them.

        It refuses by their bytes, in milliseconds for prompts whose tokenizing takes seconds and gigabytes. A prompt
        that is not refused may still have more than `max_model_len` tokens. `may_grow` is that of `ContextLengthError`.
        """
        limited = copy.copy(self)
        limited._limit = LengthBound.of(self._backend), max_model_len, may_grow
        return limited

    def to_json(self) -> str:
        """Returns the tokenizer as the text of a tokenizer.json."""
        return self._backend.to_str()

    @property
    def vocab_size(self) -> int:
        """Number of tokens, added ones included; a model's embedding may be padded beyond it."""
        return self._backend.get_vocab_size(with_added_tokens=True)

    @property
    def vocabulary(self) -> dict[str, int]:
        """The id of each token, added ones included, as the vocabulary spells it."""
        return self._backend.get_vocab(with_added_tokens=True)

    @property
    def bos_token_id(self) -> int | None:
        return self._special_id("bos_token")

    @property
    def eos_token_id(self) -> int | None:
        return self._special_id("eos_token")

    @property
    def pad_token_id(self) -> int | None:
        return self._special_id("pad_token")

    @property
    def has_chat_template(self) -> bool:
        return bool(self.chat_templates)

    @property
    def default_chat_template(self) -> str | None:
        """Source of the template that renders conversations without tools; None if there is none."""
        return self.chat_templates.get(DEFAULT_TEMPLATE)

    def token_to_id(self, token: str) -> int | None:
        """The id of a token given as the vocabulary spells it, such as "<|im_end|>"; None if there is none."""
        return self._backend.token_to_id(token)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Encodes a string; special tokens written in it become their ids.

        Args:
          text: The text.
          add_special_tokens: Add what the tokenizer's post-processor adds, such as the beginning-of-sequence token.

        Raises:
          ContextLengthError: The text has more tokens than this tokenizer is `limited_to`.
          RequestError: The text is not a string, or holds half of a surrogate pair.
        """
        self._check([text])
        # The library's `encode` and `decode` hold the GIL, for seconds if the input is long; batch functions do not.
        return self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids

    def encode_with_places(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Encodes a string without adding special tokens; returns the ids, and the (begin, end) of each in the string.

        Raises the errors of `encode`.
        """
        self._check([text])
        [encoding] = self._backend.encode_batch([text], add_special_tokens=False)
        places, end = [], 0
        for start, next_end in encoding.offsets:
            while start > end and text[start - 1].isspace():  # some post-processors leave white space out
                start -= 1
            places.append((start, next_end))
            end = next_end
        return encoding.ids, places

    def encode_pair(self, first: str, second: str) -> tuple[list[int], int]:
        """Encodes two strings as the post-processor joins pairs, such as `[CLS] first [SEP] second [SEP]`.

        Returns the ids, and the index at which the second string begins in them. Raises the errors of `encode`.
        """
        self._check([first, second])
        [encoding] = self._backend.encode_batch_fast([(first, second)])
        # Without types of its own, as some post-processors leave it, the second string begins with its first token.
        marks = encoding.type_ids if 1 in encoding.type_ids else encoding.sequence_ids
        return encoding.ids, marks.index(1) if 1 in marks else len(encoding.ids)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Decodes token ids; an id without a token, such as a padding row of the embedding, gives no text.

        Raises RequestError for a negative id, or something that is not a sequence of integers.
        """
        try:
            [text] = self._backend.decode_batch([token_ids], skip_special_tokens=skip_special_tokens)
        except (TypeError, OverflowError) as error:
            raise RequestError(f"token ids must be integers from 0 to 2**32 - 1 ({error})") from error
        return _clean_up_spaces(text) if self._clean_up_spaces else text

    def token_bytes(self, token_id: int) -> bytes:
        """Returns the UTF-8 bytes of a token inside a string; one token may hold only a part of a character."""
        data = self._bytes_of_token.get(token_id)
        if data is None:
            data = self._bytes_of_token[token_id] = self._find_token_bytes(token_id)
        return data

    def token_text(self, token_id: int) -> str:
        """Returns a token's text inside a string, its leading space included; U+FFFD for a part of a character."""
        return self.token_bytes(token_id).decode("utf-8", errors="replace")

    def utf8_decoder(self) -> codecs.IncrementalDecoder:
        """A decoder for token_bytes in sequence that holds partial characters back until they are complete.

        Invalid bytes become U+FFFD as in `decode`: one for each byte of a byte-fallback tokenizer, one for each broken
        character otherwise.
        """
        return codecs.getincrementaldecoder("utf-8")(_REPLACE_EACH_BYTE if self._byte_fallback else "replace")

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        /,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template: str | None = None,
        **template_kwargs: Any,
    ) -> str:
        """Renders a conversation to the text the model was trained on.

        Args:
          messages: Each has a role, and a content that is a string or a list of {"type": "text", "text": ...} parts.
          tools: JSON schemas of the functions the model may call.
          add_generation_prompt: True ends with the opening of the assistant's answer.
          continue_final_message: True ends inside the last message, so that the model continues it; needs
            add_generation_prompt=False.
          chat_template: Jinja source, or the name of one of the checkpoint's templates, instead of the default one.
          **template_kwargs: Further variables of the template, such as enable_thinking.

        Raises:
          RequestError: No template, malformed messages, or an error that the template raises.
        """
        return render_chat_template(
            self.choose_chat_template(chat_template, tools),
            messages,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            **{**self.special_tokens, **template_kwargs},
        )

    def choose_chat_template(self, asked: str | None, tools: Sequence[Mapping[str, Any]] | None) -> str:
        """Returns the template that `apply_chat_template` renders. Raises RequestError if there is none."""
        if asked is not None:
            return self.chat_templates.get(asked, asked)
        if not self.chat_templates:
            raise RequestError(
                "this model has no chat template: load it with one (--chat-template FILE or NAME, such as chatml, or "
                "LLM(chat_template=...)), or send a plain prompt (to a server: /v1/completions)"
            )
        name = "tool_use" if tools is not None and "tool_use" in self.chat_templates else DEFAULT_TEMPLATE
        if name not in self.chat_templates:
            raise RequestError(
                f"this checkpoint has no default chat template; choose chat_template from {sorted(self.chat_templates)}"
            )
        return self.chat_templates[name]

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], /, **kwargs: Any) -> list[int]:
        """Renders a conversation (arguments as for apply_chat_template) and encodes it.

        The post-processor adds nothing: the template writes the beginning-of-sequence token where there is one.
        """
        return self.encode(self.apply_chat_template(messages, **kwargs), add_special_tokens=False)

    def _check(self, texts: Sequence[str]) -> None:
        for text in texts:
            if not isinstance(text, str):
                raise RequestError(f"the text to encode must be a string, not {type(text).__name__}")
        if self._limit is not None:
            bound, max_model_len, may_grow = self._limit
            if (least := sum(map(bound.least_num_tokens, texts))) > max_model_len:
                raise ContextLengthError(least, max_model_len, at_least=True, may_grow=may_grow)
        for text in texts:
            try:
                text.encode("utf-8")
            except UnicodeEncodeError as error:
                raise RequestError(
                    f"the text holds a lone surrogate {text[error.start]!a} at character {error.start}; "
                    "send valid Unicode"
                ) from error

    def _special_id(self, name: str) -> int | None:
        token = self.special_tokens.get(name)
        return None if token is None else self._backend.token_to_id(token)

    def _find_token_bytes(self, token_id: int) -> bytes:
        token = self._backend.id_to_token(token_id)
        if token is None:
            return b""
        if self._byte_level:
            try:
                return bytes(BYTE_OF_CHARACTER[character] for character in token)
            except KeyError:  # an added token, written in plain characters
                return token.encode("utf-8")
        if self._byte_fallback and (match := _BYTE_TOKEN.fullmatch(token)):
            return bytes([int(match.group(1), 16)])
        # At the start of a string a decoder may drop a token's leading space, so it is decoded after another token.
        context = [] if self._context_id is None else [self._context_id]
        before = self.decode(context, skip_special_tokens=False)
        return self.decode([*context, token_id], skip_special_tokens=False).removeprefix(before).encode("utf-8")


def _register_special_tokens(backend: tokenizers.Tokenizer, config: TokenizerConfig) -> None:
    """Makes the configuration's special tokens special in the backend, with the configuration's flags."""
    present_by_id = backend.get_added_tokens_decoder()
    present = {token.content: token for token in present_by_id.values()}
    named = {token.content for token in config.special_tokens.values()}
    wanted = {}
    for token in (config.added_tokens or present_by_id).values():
        wanted[token.content] = _with_flags(token, special=token.special or token.content in named)
    for token in [*config.special_tokens.values(), *config.extra_special_tokens]:
        if token.content not in present:
            wanted.setdefault(token.content, token)
    if "Prepend" in _component_types(backend.normalizer):
        # Normalized, such a token would have the word start in front, and be found nowhere but after a space.
        wanted = {
            name: _with_flags(token, normalized=False) if token.special else token for name, token in wanted.items()
        }
    backend.add_tokens([token for name, token in wanted.items() if repr(token) != repr(present.get(name))])


def _with_flags(token: tokenizers.AddedToken, **flags: bool) -> tokenizers.AddedToken:
    kept = {name: getattr(token, name) for name in ADDED_TOKEN_FLAGS}
    return tokenizers.AddedToken(token.content, **{**kept, **flags})


def _component_types(component: Normalizer | Decoder | None) -> set[str]:
    """Returns the types of the parts of a normalizer or decoder."""
    if component is None:
        return set()
    types, stack = set(), [json.loads(component.__getstate__())]
    while stack:
        part = stack.pop()
        types.add(part["type"])
        stack.extend([*part.get("normalizers", ()), *part.get("decoders", ())])
    return types


def _clean_up_spaces(text: str) -> str:
    for spaced in (" .", " ?", " !", " ,"):
        text = text.replace(spaced, spaced[1:])
    text = text.replace(" ' ", "'")
    for spaced in (" n't", " 'm", " 's", " 've", " 're"):
        text = text.replace(spaced, spaced[1:])
    return text


def _replace_each_byte(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeDecodeError)
    return "\ufffd" * (error.end - error.start), error.end


codecs.register_error(_REPLACE_EACH_BYTE, _replace_each_byte)
