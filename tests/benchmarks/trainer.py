"""Compare a GRPO step with TRL's, and measure each technique and its memory: `make bench-trainer`.

Both sides have the same weights, LoRA, sequences and threads, and alternate. A step is forward, loss and backward over
all sequences; both must give the same loss and gradient. Tokens are the real tokens of all sequences, without padding,
no matter how many of them each side computes.
"""

import argparse
import os
import platform
from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch
from trl import GRPOTrainer

from alignment.config.policy_gradient_algorithms import GRPOConfig, PPOConfig
from alignment.config.trainer import Packing, TrainerConfig
from alignment.models.policy_model import PolicyModel
from tests.benchmarks import candidates, peak, steps, trl_step
from tests.benchmarks.candidates import Case
from tests.benchmarks.timing import TOLERANCE, Implementation, Timings

MB = 1 << 20
PACKINGS: tuple[Packing, ...] = ("off", "tree")


def machine() -> str:
    parts = [f"{os.cpu_count()} cores", platform.machine(), "no GPU", f"Python {platform.python_version()}"]
    parts += [f"{name} {version(name)}" for name in ("torch", "transformers", "peft", "trl")]
    return ", ".join(parts) + f"; load average at the start {os.getloadavg()[0]:.1f}"


def same_gradient(policy: PolicyModel, trainer: GRPOTrainer, case: Case) -> str:
    """Return the differences of loss and gradient. Raises AssertionError if the two sides differ."""
    loss, other_loss = steps.step(policy, case), trl_step.step(trainer, case, len(case.sequences) // 2)
    ours, theirs = steps.gradients(policy), trl_step.gradients(trainer)
    if ours.keys() != theirs.keys():
        raise AssertionError("not the same parameters")
    largest = max(float(gradient.abs().max()) for gradient in theirs.values())
    difference = max(float((gradient - theirs[name]).abs().max()) for name, gradient in ours.items())
    if abs(loss - other_loss) > TOLERANCE or difference > TOLERANCE * largest:
        raise AssertionError(f"losses {loss} and {other_loss}, gradients differ by {difference}, the largest {largest}")
    return f"losses {abs(loss - other_loss):.0e} apart, gradients {difference / largest:.0e} of the largest"


def compare_with_trl(case: Case, threads: list[int], rounds: int) -> None:
    policy = steps.build(case.model)
    trainer = trl_step.build(
        case.model, {name: parameter.detach() for name, parameter in policy.role_parameters("actor").items()}
    )
    print(f"\n### {case.name}: {case}\n\n{same_gradient(policy, trainer, case)}\n")
    print("| threads | ours, tokens/s | TRL | ours to TRL | TRL, logits of replies only | ours to that | load |")
    print("|---|---|---|---|---|---|---|")
    for count in threads:
        torch.set_num_threads(count)
        size = best_batch_size(trainer, case)
        implementations = {
            "ours": partial(steps.step, policy, case),
            "TRL": partial(trl_step.step, trainer, case, size),
            "TRL, replies": partial(trl_step.step, trainer, case, size, compact=True),
        }
        timings = Timings.measure(implementations, rounds)
        rates = [f"{timings.rate(name, case.tokens):,.0f}" for name in implementations]
        ratios = [f"**{timings.speedup('ours', name):.2f}**" for name in list(implementations)[1:]]
        cells = [str(count), rates[0], f"{rates[1]} (batches of {size})", ratios[0], rates[2], ratios[1]]
        print(f"| {' | '.join(cells)} | {os.getloadavg()[0]:.1f} |", flush=True)


def best_batch_size(trainer: GRPOTrainer, case: Case) -> int:
    """Return TRL's fastest `per_device_train_batch_size` of those that divide the batch."""
    sizes = [size for size in (4, 8, 16, 32) if len(case.sequences) % size == 0]
    implementations = {str(size): partial(trl_step.step, trainer, case, size) for size in sizes}
    timings = Timings.measure(implementations, rounds=2)
    return min(sizes, key=lambda size: min(timings.seconds[str(size)]))


def techniques(cases: list[Case], threads: int, rounds: int) -> None:
    torch.set_num_threads(threads)
    print(f"\n## The effect of each technique ({threads} threads)\n")
    print("Each line includes the techniques above it. Tokens/s, and in brackets computed tokens per real token.\n")
    table: dict[str, list[str]] = {}
    for case in cases:
        policy = steps.build(case.model)
        padded, packed = partial(steps.padded_step, policy, case), partial(steps.step, policy, case)
        implementations = {
            "rows padded to the longest, logits of all tokens": partial(padded, everywhere=True),
            "logits of replies only": partial(padded, everywhere=False),
            "rows of similar length (`off`)": partial(packed, "off", steps.NO_CHUNKS),
            "turns of a conversation in one row (`chain`)": partial(packed, "chain", steps.NO_CHUNKS),
            "common prefixes in one row (`tree`)": partial(packed, "tree", steps.NO_CHUNKS),
            "logits in chunks": packed,
        }
        timings = Timings.measure(implementations, rounds)
        longest = max(len(sequence.ids) for sequence in case.sequences) * len(case.sequences)
        sizes = [longest, longest, *(steps.computed(case, packing)[0] for packing in ("off", "chain", "tree", "tree"))]
        for (name, _), size in zip(implementations.items(), sizes, strict=True):
            table.setdefault(name, []).append(f"{timings.rate(name, case.tokens):,.0f} ({size / case.tokens:.2f})")
    print(f"| | {' | '.join(case.name for case in cases)} |\n|{'---|' * (len(cases) + 1)}")
    for name, cells in table.items():
        print(f"| {name} | {' | '.join(cells)} |", flush=True)


def layouts(cases: list[Case], threads: int, rounds: int) -> None:
    torch.set_num_threads(threads)
    print(f"\n## Padded rows against concatenated rows ({threads} threads)\n")
    print("| | padded, tokens/s | concatenated | padded / concatenated |\n|---|---|---|---|")
    for case in cases:
        policy = steps.build(case.model)
        for packing in PACKINGS:
            implementations = {
                "padded": partial(steps.step, policy, case, packing),
                "concatenated": partial(steps.concatenated_step, policy, case, packing),
            }
            timings = Timings.measure(implementations, rounds)
            rates = " | ".join(f"{timings.rate(name, case.tokens):,.0f}" for name in implementations)
            ratio = timings.speedup("padded", "concatenated")
            print(f"| {case.name}, `{packing}` | {rates} | {ratio:.2f} |", flush=True)


def masks(models: dict[str, Path], threads: list[int], rounds: int) -> None:
    """Measure the constants of `prefix_sharing.estimate_cost`."""
    print("\n## A mask against causal attention: ms for 2,048 tokens through the decoder and back\n")
    print("| model, threads | row | causal | bool mask | float mask |\n|---|---|---|---|---|")
    for name, model in models.items():
        decoder = steps.build(model).base_lm.model.get_decoder()
        for count in threads:
            torch.set_num_threads(count)
            for width in (128, 256, 512, 1024, 2048):
                timings = Timings.measure(_attentions(decoder, width), rounds)
                cells = " | ".join(f"{1000 * median(seconds):.0f}" for seconds in timings.seconds.values())
                print(f"| {name}, {count} | {width} | {cells} |", flush=True)


def _attentions(decoder: Callable[..., Any], width: int) -> dict[str, Implementation]:
    size = 2048 // width
    ids_BT = torch.randint(0, 1000, (size, width), generator=torch.Generator().manual_seed(0))
    mask = torch.ones(width, width, dtype=torch.bool).tril().expand(size, 1, width, width).contiguous()
    floats = torch.zeros(mask.shape).masked_fill(~mask, float("-inf"))

    def run(mask: torch.Tensor | None) -> float:
        positions_BT = None if mask is None else torch.arange(width).expand(size, width)
        output = decoder(input_ids=ids_BT, attention_mask=mask, position_ids=positions_BT, use_cache=False)
        hidden_BTD: torch.Tensor = output.last_hidden_state
        hidden_BTD.mean().backward()
        return float(hidden_BTD.detach().mean())

    return {"causal": partial(run, None), "bool": partial(run, mask), "float": partial(run, floats)}


def memory(model: Path, threads: int) -> None:
    default_config = TrainerConfig(device="cpu", max_mismatch=100.0)
    print(f"\n## Peak memory of one update, 100 M model ({threads} threads)\n")
    print("MB, and in brackets how many times the base model alone, which scores the same batch without gradients.\n")
    print("| | micro-batches, tokens | activation checkpointing | logits | default malloc | freed memory returned |")
    print("|---|---|---|---|---|---|")
    base: dict[tuple[int, bool], int] = {}
    for tokens in (2048, 512):
        config = default_config.model_copy(update={"micro_batch_tokens": tokens})
        for return_memory in (False, True):
            loaded, base[tokens, return_memory] = peak.measure(model, "base", config, threads, return_memory)
        cells = " | ".join(f"{base[tokens, return_memory] / MB:.0f}" for return_memory in (False, True))
        print(f"| base model alone ({loaded / MB:.0f} when loaded) | {tokens:,} | | chunks | {cells} |", flush=True)
    algorithms = {
        "GRPO, reference": GRPOConfig(epochs=1, minibatches=1),
        "PPO, critic, reference": PPOConfig(estimator="gae", epochs=1, minibatches=1),
    }
    implementations = (
        (2048, False, False),
        (2048, False, True),
        (2048, True, True),
        (512, False, True),
        (512, True, True),
    )
    for name, algorithm in algorithms.items():
        for tokens, checkpointing, chunks in implementations:
            settings = {"algorithm": algorithm, "micro_batch_tokens": tokens, "activation_checkpointing": checkpointing}
            config = default_config.model_copy(update=settings | ({} if chunks else {"logits_chunk": steps.NO_CHUNKS}))
            row = [name, f"{tokens:,}", "yes" if checkpointing else "no", "chunks" if chunks else "at once"]
            for return_memory in (False, True):
                _, most = peak.measure(model, "update", config, threads, return_memory)
                row.append(f"{most / MB:.0f} ({most / base[tokens, return_memory]:.2f})")
            print(f"| {' | '.join(row)} |", flush=True)


TABLES = ("trl", "techniques", "layouts", "masks", "memory")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tables", nargs="+", choices=TABLES, default=TABLES)
    parser.add_argument("--models", nargs="+", choices=("demo", "wide"), default=("demo", "wide"))
    parser.add_argument("--threads", nargs="+", type=int, default=[2, 1])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--demo-prompts", type=int, default=8)
    parser.add_argument("--wide-prompts", type=int, default=2)
    arguments = parser.parse_args()
    print(f"# The trainer\n\n{machine()}", flush=True)
    with TemporaryDirectory() as directory:
        wide_model = Path(directory)
        groups = candidates.demo_groups(arguments.demo_prompts)
        conversations = candidates.demo_conversations(3 * arguments.demo_prompts)
        against, cases, models = [groups], [groups, conversations], {"demo": candidates.DEMO}
        if "wide" in arguments.models:
            candidates.write_wide(wide_model)
            wide = candidates.wide_groups(wide_model, arguments.wide_prompts)
            against, cases, models = [groups, wide], [*cases, wide], models | {"100 M": wide_model}
        if "trl" in arguments.tables:
            print("\n## A GRPO loss step against TRL's")
            for case in against:
                compare_with_trl(case, arguments.threads, arguments.rounds)
        if "techniques" in arguments.tables:
            techniques(cases, arguments.threads[0], arguments.rounds)
        if "layouts" in arguments.tables:
            layouts(cases, arguments.threads[0], arguments.rounds)
        if "masks" in arguments.tables:
            masks(models, arguments.threads, arguments.rounds)
        if "memory" in arguments.tables and "wide" in arguments.models:
            memory(wide_model, arguments.threads[0])


if __name__ == "__main__":
    main()
