"""Train the demo's tokenizer: a byte-level BPE of the dialogues, with Qwen2.5's special tokens."""

import json
from collections.abc import Iterable
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers, trainers
from transformers import Qwen2Tokenizer

VOCABULARY = 1536
END_OF_TEXT, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
CONTEXT = 2048

_TEMPLATE = Path(__file__).with_name("chat_template.jinja")


def train_tokenizer(texts: Iterable[str]) -> Qwen2Tokenizer:
    # Loaders of Qwen2 models use the pre-tokenizer of Qwen2, so the merges are learned from its words.
    qwen2 = Qwen2Tokenizer().backend_tokenizer
    bpe = Tokenizer(models.BPE())
    bpe.normalizer, bpe.pre_tokenizer, bpe.decoder = qwen2.normalizer, qwen2.pre_tokenizer, qwen2.decoder
    specials = [END_OF_TEXT, START, END]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - 2,  # minus the two tokens added below
        special_tokens=specials,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    learned = json.loads(bpe.to_str())["model"]
    tokenizer = Qwen2Tokenizer(
        vocab=learned["vocab"],
        merges=[tuple(merge) for merge in learned["merges"]],
        unk_token=None,
        eos_token=END,
        pad_token=END_OF_TEXT,
        additional_special_tokens=[START, END],
        clean_up_tokenization_spaces=False,
        model_max_length=CONTEXT,
    )
    # Not special tokens, so that decoding keeps them: the engine's tool parser reads them in the text.
    tokenizer.add_tokens([AddedToken(tag, normalized=False, special=False) for tag in ("<tool_call>", "</tool_call>")])
    tokenizer.chat_template = _TEMPLATE.read_text()
    return tokenizer
