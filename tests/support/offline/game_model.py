"""A tiny model that knows the format of a game and nothing of how to win: pretrained on transcripts of random play."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from random import Random

import torch
from tokenizers import AddedToken
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer

from demo.train import END, END_OF_TEXT, fit, make_batches, save, train_tokenizer

CONTEXT = 2048
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
    model = Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=len(tokenizer),
            hidden_size=64,
            num_hidden_layers=3,
            intermediate_size=128,
            num_attention_heads=2,
            num_key_value_heads=2,
            max_position_embeddings=CONTEXT,
            tie_word_embeddings=True,
            eos_token_id=tokenizer.convert_tokens_to_ids(END),
            bos_token_id=None,
            pad_token_id=tokenizer.convert_tokens_to_ids(END_OF_TEXT),
        )
    )
    fit(model, list(make_batches(examples, Random(seed))))
    save(model, tokenizer, out)


def _make_example(tokenizer: Qwen2Tokenizer, messages: Transcript) -> tuple[list[int], list[float]]:
    text = str(tokenizer.apply_chat_template(list(messages), tokenize=False))
    ids = list(tokenizer.encode(text, add_special_tokens=False))
    return ids, [1.0] * len(ids)
