from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tokenizers import Regex, normalizers

from jaxis.errors import CheckpointError
from jaxis.tokenizer.checkpoint_tokenizer import read_checkpoint_tokenizer

_SPACE = "\ue000"  # in place of a string that is one space, which a strip would empty
_NORMALIZER = normalizers.Sequence(
    [
        *(normalizers.NFKC(), normalizers.NFD(), normalizers.StripAccents(), normalizers.Lowercase()),
        normalizers.Replace(Regex(r"[ \t\r\n]+"), " "),
        normalizers.Replace(Regex(r"^ $"), _SPACE),
        normalizers.Strip(),
        normalizers.Replace(_SPACE, " "),
    ]
)


@dataclass(frozen=True)
class TokenClasses:
    """Classes of tokens whose texts differ by case, accents and white space only (DeepSeek V4.1's Engram).

    Classes are numbered by their first tokens. A token that is part of a character is a class by itself.

    Attributes:
      folder: Folder of the checkpoint, whose tokenizer tells the texts.
      num_tokens: V, the rows of the embeddings; those without a token are in the class of `filler`.
      num_classes: The number that the checkpoint was trained with.
      filler: Token that stands for those before the beginning.
    """

    folder: str
    num_tokens: int
    num_classes: int
    filler: int

    def __call__(self) -> np.ndarray:
        """Returns the class i32 [V] of each token.

        Raises CheckpointError if there is no tokenizer, or another one than the model was trained with.
        """
        if (found := read_checkpoint_tokenizer(Path(self.folder))) is None:
            raise CheckpointError("n-grams are of classes of tokens, which the tokenizer tells: add tokenizer.json")
        tokenizer, size = found[0], min(found[0].get_vocab_size(), self.num_tokens)
        texts = tokenizer.decode_batch([[token] for token in range(size)], skip_special_tokens=False)
        keys = [
            tokenizer.id_to_token(token) if "\ufffd" in text else _NORMALIZER.normalize_str(text) or text
            for token, text in enumerate(texts)
        ]
        numbers = {key: number for number, key in enumerate(dict.fromkeys(keys))}
        if len(numbers) != self.num_classes:
            raise CheckpointError(
                f"the tokenizer has {len(numbers)} classes of tokens, but n-grams were trained with {self.num_classes} "
                "(engram_compressed_vocab_size): take the tokenizer that the model was published with"
            )
        classes = [numbers[key] for key in keys]
        return np.array(classes + [classes[self.filler]] * (self.num_tokens - size), np.int32)
