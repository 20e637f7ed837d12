"""The same step by TRL: the loss of a real GRPOTrainer on its own batch layout, and backward.

TRL pads all prompts of a generation batch on the left and all replies on the right, each to the longest, and cuts
that into micro-batches of `per_device_train_batch_size`.
"""

from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import torch
import trl.trainer.utils
from datasets import Dataset
from peft import LoraConfig
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

from alignment.config.trainer import LoRAConfig
from tests.benchmarks.candidates import DEMO, Case, N


def build(model: Path, adapter: dict[str, Tensor]) -> GRPOTrainer:
    lora = LoRAConfig()
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, local_files_only=True),
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=GRPOConfig(
            output_dir=mkdtemp(),
            use_cpu=True,
            bf16=False,
            report_to=[],
            beta=0.0,
            loss_type="grpo",
            num_generations=N,
            per_device_train_batch_size=N,
            gradient_checkpointing=False,
        ),
        train_dataset=Dataset.from_list([{"prompt": "Hello"}] * N),
        processing_class=AutoTokenizer.from_pretrained(DEMO, local_files_only=True),
        peft_config=LoraConfig(
            r=lora.r,
            lora_alpha=lora.alpha,
            target_modules=sorted({name.split(".")[-3] for name in adapter}),
            task_type="CAUSAL_LM",
        ),
    )
    trainer.model.train()
    with torch.no_grad():
        for name, parameter in _trainable(trainer).items():
            parameter.copy_(adapter[name])
    return trainer


def _trainable(trainer: GRPOTrainer) -> dict[str, torch.nn.Parameter]:
    parameters = trainer.model.named_parameters()
    return {name.replace(".default.", "."): parameter for name, parameter in parameters if parameter.requires_grad}


def gradients(trainer: GRPOTrainer) -> dict[str, Tensor]:
    return {
        name: parameter.grad.clone() for name, parameter in _trainable(trainer).items() if parameter.grad is not None
    }


def collate(case: Case) -> dict[str, Tensor]:
    """Return the tensors that TRL makes of a generation batch."""
    prompts = [torch.tensor(sequence.ids[: sequence.start]) for sequence in case.sequences]
    outputs = [torch.tensor(sequence.ids[sequence.start :]) for sequence in case.sequences]

    def pad(parts: list[Tensor], side: str) -> tuple[Tensor, Tensor]:
        ids = torch.nn.utils.rnn.pad_sequence(parts, batch_first=True, padding_side=side)
        masks = [torch.ones_like(part) for part in parts]
        return ids, torch.nn.utils.rnn.pad_sequence(masks, batch_first=True, padding_side=side)

    batch = dict(zip(("prompt_ids", "prompt_mask"), pad(prompts, "left"), strict=True))
    batch |= dict(zip(("completion_ids", "completion_mask"), pad(outputs, "right"), strict=True))
    return batch | {"advantages": case.advantages_B}


def step(trainer: GRPOTrainer, case: Case, batch_size: int, *, compact: bool = False) -> float:
    """Make one step and return the loss.

    With `compact` TRL computes the logits of replies only, which by default it does on GPUs only. TRL collects metrics
    in every loss; they are cleared, as its logging does.
    """
    use_triton = trl.trainer.utils._use_triton
    if compact:
        trl.trainer.utils._use_triton = lambda _device: True
    try:
        return _step(trainer, collate(case), batch_size)
    finally:
        trl.trainer.utils._use_triton = use_triton


def _step(trainer: GRPOTrainer, batch: dict[str, Any], batch_size: int) -> float:
    trainer.model.zero_grad()
    starts = range(0, len(batch["prompt_ids"]), batch_size)
    trainer.current_gradient_accumulation_steps = len(starts)
    total = 0.0
    for start in starts:
        inputs = {name: part[start : start + batch_size] for name, part in batch.items()}
        loss = trainer._compute_loss(trainer.model, inputs)
        loss.backward()
        total += float(loss.detach())
    trainer._metrics["train"].clear()
    return total
