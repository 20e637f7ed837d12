"""Measure the trainer on a GPU, on models of real size with random weights: tokens/s, peak memory, bfloat16 error.

python -m tests.gpu.trainer --size 1.5b          on a GPU (3b and 8b as well)
python -m tests.gpu.trainer --size tiny --device cpu      to check the script itself

Prints one Markdown table and downloads nothing.
"""

import argparse
import platform
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from statistics import median

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from alignment.config.algorithm_choice import AlgorithmConfig
from alignment.config.policy_gradient_algorithms import GRPOConfig, PPOConfig
from alignment.config.trainer import CriticConfig, LoRAConfig, TrainerConfig
from alignment.trainer.scoring import recompute_logprobs
from alignment.trainer.trainer import Trainer
from alignment.types import Batch, Sample

SIZES = {  # the sizes of Qwen2.5: hidden, intermediate, layers, heads, key-value heads, vocabulary
    "tiny": (64, 128, 2, 4, 2, 512),
    "1.5b": (1536, 8960, 28, 12, 2, 151_936),
    "3b": (2048, 11008, 36, 16, 2, 151_936),
    "8b": (3584, 18944, 28, 28, 4, 152_064),
}
ROUNDS = 3


def base_model(folder: Path, size: str, dtype: torch.dtype) -> Path:
    hidden, intermediate, layers, heads, kv_heads, vocabulary = SIZES[size]
    config = Qwen2Config(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        tie_word_embeddings=size != "8b",
        bos_token_id=None,
        eos_token_id=0,
    )
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = Qwen2ForCausalLM._from_config(config, dtype=dtype)
    model.save_pretrained(folder)
    alphabet = {char: index for index, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=alphabet, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    return folder


def groups(model: Path, count: int, prompt: int, longest: int, settings: dict[str, str]) -> Batch:
    """Return `count` prompts with four replies each, with the log-probs of the base model."""
    vocabulary, generator = Qwen2Config.from_pretrained(model).vocab_size, torch.Generator().manual_seed(1)

    def ids(length: int) -> tuple[int, ...]:
        return tuple(torch.randint(1, vocabulary, (length,), generator=generator).tolist())

    drafts = []
    for group in range(count):
        prompt_ids = ids(prompt)
        for index in range(4):
            output_ids = ids(int(torch.randint(longest // 4, longest + 1, (), generator=generator)))
            drafts.append(
                Sample(
                    turn_id=f"{group}.{index}",
                    prompt_ids=prompt_ids,
                    output_ids=output_ids,
                    logprobs=(0.0,) * len(output_ids),
                    reward=float(index),
                    version=0,
                    group=str(group),
                )
            )
    scored = recompute_logprobs(model, None, drafts, **settings)
    samples = [replace(draft, logprobs=tuple(p.tolist())) for draft, p in zip(drafts, scored, strict=True)]
    return Batch("gpu", "random", tuple(samples))


def measure(model: Path, batch: Batch, config: TrainerConfig) -> tuple[float, float]:
    """Return the median tokens/s of the updates, and peak memory divided by the size of the base weights."""
    cuda = torch.cuda.is_available() and config.device != "cpu"
    if cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated() if cuda else 0
    trainer = Trainer(model, config)
    speeds = []
    for _ in range(ROUNDS + 1):
        trainer.restore(None)
        started = time.perf_counter()
        trainer.update(batch)
        if cuda:
            torch.cuda.synchronize()
        speeds.append(sum(sample.num_tokens for sample in batch.samples) / (time.perf_counter() - started))
    base = sum(p.numel() * p.element_size() for n, p in trainer.policy.named_parameters() if "lora_" not in n)
    peak = torch.cuda.max_memory_allocated() - before if cuda else float("nan")
    return median(speeds[1:]), peak / base


def bfloat16_error(model: Path, batch: Batch, device: str) -> float:
    """Return the largest difference of a log-prob between bfloat16 and float32."""
    samples = batch.samples[:8]
    float32 = recompute_logprobs(model, None, samples, dtype="float32", device=device)
    bfloat16 = recompute_logprobs(model, None, samples, dtype="bfloat16", device=device)
    return max(float(abs(a - b).max()) for a, b in zip(float32, bfloat16, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.trainer", description=__doc__)
    parser.add_argument("--size", choices=SIZES, default="1.5b")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--prompts", type=int, default=16)
    arguments = parser.parse_args()
    is_tiny = arguments.size == "tiny"
    algorithms: dict[str, AlgorithmConfig] = {
        "GRPO with reference": GRPOConfig(),
        "PPO with critic and reference": PPOConfig(estimator="gae"),
    }
    name = torch.cuda.get_device_name() if arguments.device == "cuda" else platform.processor() or "CPU"
    with tempfile.TemporaryDirectory() as folder:
        model = base_model(Path(folder), arguments.size, torch.bfloat16)
        settings = {"dtype": "bfloat16", "device": arguments.device}
        batch = groups(model, arguments.prompts, 24 if is_tiny else 512, 32 if is_tiny else 512, settings)
        print(f"{name}, torch {torch.__version__}, {arguments.size}, {len(batch.samples)} replies, bfloat16\n")
        print("| algorithm | rank | activation checkpointing | tokens/s | peak memory / base weights |")
        print("|---|---|---|---|---|")
        for label, algorithm in algorithms.items():
            for rank in (16, 64):
                for checkpointing in (False, True):
                    config = TrainerConfig(
                        algorithm=algorithm,
                        lora=LoRAConfig(r=rank, alpha=2 * rank),
                        critic=CriticConfig(r=rank),
                        micro_batch_tokens=8192,
                        activation_checkpointing=checkpointing,
                        dtype="bfloat16",
                        device=arguments.device,
                        max_mismatch=5.0,  # random weights in bfloat16: every log-prob is near −log(vocabulary)
                    )
                    try:
                        speed, peak = measure(model, batch, config)
                        figures = f"{speed:,.0f} | {peak:.2f} ×"
                    except torch.OutOfMemoryError:
                        figures = "out of memory |"
                    print(f"| {label} | {rank} | {'yes' if checkpointing else 'no'} | {figures} |", flush=True)
        print(f"\nLargest |bfloat16 − float32| of a log-prob: {bfloat16_error(model, batch, arguments.device):.3f}")


if __name__ == "__main__":
    main()
