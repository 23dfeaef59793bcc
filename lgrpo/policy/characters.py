"""A character-level tokenizer."""

from __future__ import annotations

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast


def character_tokenizer(characters: str) -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token per character, plus padding and end of sequence.

    >>> tokenizer = character_tokenizer("0123456789")
    >>> tokenizer("407").input_ids, tokenizer.decode([6, 2, 9])
    ([6, 2, 9], '407')
    """
    tokens = ["<pad>", "<eos>", *dict.fromkeys(characters)]
    backend = Tokenizer(models.WordLevel({token: i for i, token in enumerate(tokens)}, unk_token="<pad>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex("(?m:.)"), behavior="isolated")
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", unk_token="<pad>", eos_token="<eos>")
