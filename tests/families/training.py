"""The trainer's side of the matrix: two updates of a family's model, compared with transformers after each."""

from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from alignment.artifacts.model_spec import ModelSpec
from alignment.artifacts.specs import ADAPTER, ADAPTER_PREFIX, AdapterSpec, check_adapter
from alignment.config.policy_gradient_algorithms import GRPOConfig
from alignment.config.trainer import LoRAConfig, OptimConfig, TrainerConfig
from alignment.data.micro_batches import ScoredSequence
from alignment.models.describe import describe, describe_folder
from alignment.trainer.scoring import score_sequences
from alignment.trainer.trainer import Trainer
from alignment.types import Batch, Sample

LORA = LoRAConfig(r=4, alpha=8)
NUM_TOKENS = 40  # longer than the windows of the checkpoints
Scores = tuple[tuple[float, ...], ...]


@dataclass(frozen=True)
class TrainedVersion:
    """A version: the folder of its adapter (None: the base model), and the log-probs of `SEQUENCES` in transformers."""

    folder: Path | None
    logprobs: Scores
    distance: float  # largest |trainer - transformers|, in nats


@dataclass(frozen=True)
class TrainedFamily:
    """What the trainer's side found. `versions`: the base model and two versions."""

    model: ModelSpec
    spec: AdapterSpec
    architecture: str
    versions: tuple[TrainedVersion, ...]


def sequences() -> tuple[tuple[int, ...], ...]:
    """Return the token ids that engine, trainer and transformers score."""
    generator = torch.Generator().manual_seed(1)
    return tuple(
        tuple(torch.randint(3, 500, (length,), generator=generator).tolist()) for length in (NUM_TOKENS, NUM_TOKENS - 9)
    )


def train_family(checkpoint: Path, folder: Path) -> TrainedFamily:
    """Make two updates with the service's own trainer and export both versions into `folder`.

    Raises ValueError for a model that the trainer refuses.
    """
    trainer = Trainer(
        checkpoint,
        TrainerConfig(algorithm=GRPOConfig(), lora=LORA, optim=OptimConfig(lr=1e-2), device="cpu", seed=3),
    )
    model, spec = describe_folder(checkpoint), trainer.adapter_spec
    loaded = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    assert model == describe(loaded), "the walk on meta differs from the walk over the loaded model"
    assert spec is not None and spec == AdapterSpec.from_model(model, LORA)
    versions = [_compare(trainer, loaded, None)]
    for number in (1, 2):
        before = {name: tensor.detach().clone() for name, tensor in trainer.policy.role_parameters("actor").items()}
        trainer.update(draw_batch(trainer, seed=number))
        export = trainer.export(folder / f"v{number}", {"parent": f"v{number - 1}"})
        check_adapter(export.path, spec)
        adapter = load_file(export.path / ADAPTER)
        still = [name for name, tensor in adapter.items() if torch.equal(tensor, before[name])]
        # With B at zero the first update moves no A.
        assert not [name for name in still if number == 2 or "lora_B" in name], f"not trained: {still[:3]}"
        versions.append(_compare(trainer, _merge(checkpoint, adapter, spec), export.path))
    return TrainedFamily(model, spec, type(loaded).__name__, tuple(versions))


def draw_batch(trainer: Trainer, seed: int) -> Batch:
    """Return three groups of four random replies, with the policy's own log-probs; replies with token 7 are rewarded.

    All prompts of a group are equal, so the batch has prefixes that rows share.
    """
    generator = torch.Generator().manual_seed(seed)

    def ids(length: int) -> tuple[int, ...]:
        return tuple(torch.randint(3, 500, (length,), generator=generator).tolist())

    prompts = [ids(20) for _ in range(3)]
    drafts = [(prompt, (7 if index % 2 else 9, *ids(6 + index)), index) for prompt in prompts for index in range(4)]
    scored = [ScoredSequence(prompt + output, start=len(prompt)) for prompt, output, _ in drafts]
    rows = score_sequences(trainer.policy, scored, max_tokens=256).tolist()
    samples = tuple(
        Sample(
            turn_id=f"{seed}-{number}",
            prompt_ids=prompt,
            output_ids=output,
            logprobs=tuple(row[: len(output)]),
            reward=float(index % 2),
            version=seed - 1,
            group=str(prompt[0]),
        )
        for number, ((prompt, output, index), row) in enumerate(zip(drafts, rows, strict=True))
    )
    return Batch(id=f"batch-{seed}", policy="shop", samples=samples)


def _compare(trainer: Trainer, model: PreTrainedModel, folder: Path | None) -> TrainedVersion:
    scored = [ScoredSequence(ids, start=1) for ids in sequences()]
    ours = score_sequences(trainer.policy, scored, max_tokens=256)
    expected = transformers_logprobs(model)
    distance = max(
        float((row[: len(values)] - torch.tensor(values)).abs().max())
        for row, values in zip(ours, expected, strict=True)
    )
    return TrainedVersion(folder, expected, distance)


@torch.no_grad()
def transformers_logprobs(model: PreTrainedModel) -> Scores:
    """Return the log-prob of each token but the first of each sequence, one sequence at a time."""

    def score(ids: tuple[int, ...]) -> tuple[float, ...]:
        logits = model(torch.tensor([ids])).logits[0, :-1].float()
        return tuple(logits.log_softmax(-1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0].tolist())

    return tuple(score(ids) for ids in sequences())


@torch.no_grad()
def _merge(checkpoint: Path, adapter: dict[str, Tensor], spec: AdapterSpec) -> PreTrainedModel:
    """Return transformers' own model with W + scale · B A in place of each adapted W."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    for path in spec.module_paths:
        a, b = (adapter[f"{ADAPTER_PREFIX}{path}.lora_{matrix}.weight"] for matrix in "AB")
        model.get_submodule(path).weight += spec.scale * b @ a
    return model
