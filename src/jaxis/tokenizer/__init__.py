"""Text to token ids and back: the tokenizer, chat templates, and incremental detokenization with stop strings."""

from jaxis.tokenizer.detokenizer import IncrementalDetokenizer, TokenPlaces
from jaxis.tokenizer.tokenizer import Tokenizer

__all__ = ["IncrementalDetokenizer", "TokenPlaces", "Tokenizer"]
