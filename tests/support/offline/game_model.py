"""A tiny model that knows the format of a game and nothing of how to win: pretrained on transcripts of random play."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from random import Random

import torch
from tokenizers import AddedToken
from transformers import Qwen2Tokenizer

from demo.train import fit, make_batches, new_model, save, train_tokenizer

Transcript = Sequence[Mapping[str, str]]  # the messages of a game, from the first to the last


def train_game_model(
    transcripts: Sequence[Transcript], others: Sequence[Transcript], words: Iterable[str], out: Path, seed: int
) -> None:
    """Train a tokenizer and a model of 0.2 M parameters on all tokens of the transcripts, and write both.

    The tokenizer knows the texts of `others`, too. Each of `words`, such as the numbers of a game, is one token.
    """
    torch.manual_seed(seed)
    texts = ("\n".join(message["content"] for message in messages) for messages in (*transcripts, *others))
    tokenizer = train_tokenizer(texts)
    tokenizer.add_tokens([AddedToken(word, normalized=False, special=False) for word in words])
    examples = [_make_example(tokenizer, messages) for messages in transcripts]
    model = new_model(tokenizer, width=64, mlp_width=128, num_layers=3, num_heads=2)
    fit(model, list(make_batches(examples, Random(seed))), bfloat16=False)
    save(model, tokenizer, out)


def _make_example(tokenizer: Qwen2Tokenizer, messages: Transcript) -> tuple[list[int], list[float]]:
    text = str(tokenizer.apply_chat_template(list(messages), tokenize=False))
    ids = list(tokenizer.encode(text, add_special_tokens=False))
    return ids, [1.0] * len(ids)
