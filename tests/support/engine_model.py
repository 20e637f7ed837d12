"""A tiny random Qwen2 model with a byte-level tokenizer and a chat template."""

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CORPUS = [
    "Guten Tag, was kostet die Inspektion für mein Rad?",
    "The shop opens at nine and closes at six.",
] * 20
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def save_tokenizer(folder: Path) -> None:
    """Write a byte-level tokenizer of 384 tokens with a chat template."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    bpe.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=384, special_tokens=SPECIAL, initial_alphabet=alphabet)
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe, eos_token="<|im_end|>", pad_token="<|endoftext|>", chat_template=TEMPLATE
    )
    tokenizer.save_pretrained(folder)


def make_tiny_model(folder: Path, *, seed: int = 0) -> Path:
    """Write the model in Hugging Face's format and return its folder. Deterministic for a seed."""
    save_tokenizer(folder)
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=384, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=4096, tie_word_embeddings=True,
        bos_token_id=0, eos_token_id=2, pad_token_id=0, initializer_range=0.2,
    )  # fmt: skip
    Qwen2ForCausalLM(config).save_pretrained(folder)
    return folder
