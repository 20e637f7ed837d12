"""What the planner chooses, and what it says where something does not fit."""

import json
import re
from pathlib import Path

import pytest

from alignment.planning.hardware import find_gpu
from alignment.planning.memory import UpdateShape
from alignment.planning.plan import USABLE, Plan, PlanRequest, make_plan
from alignment.planning.speed import Work, delivery_ms, flops_per_token, update_seconds
from tests.alignment.planning.test_memory import describe

GRPO = Work(tokens=150_000, epochs=1, has_critic=False)


def plan_for(folder: Path, name: str, gpus: int, gpu: str = "H100-80", context: int = 4096, work: Work = GRPO) -> Plan:
    model, spec = describe(folder, name, rank=16)
    return make_plan(model, spec, PlanRequest(find_gpu(gpu), gpus, context, work))


@pytest.mark.parametrize(("name", "gpus"), [("qwen2.5-7b", 1), ("llama-8b", 2), ("llama-70b", 8), ("qwen3-30b-a3b", 4)])
def test_plan_fits_and_uses_each_gpu_once(tmp_path: Path, name: str, gpus: int) -> None:
    plan = plan_for(tmp_path, name, gpus)
    assert plan.trainer is not None and plan.engine is not None
    memory = find_gpu("H100-80").memory * USABLE
    engine = sum(plan.engine.memory.values())
    assert plan.trainer.replicas * plan.trainer.shape.shards == plan.trainer.gpus
    if plan.shares_gpu:
        assert plan.trainer.peak + engine <= memory * 1.001
    else:
        assert plan.engine.tp + plan.trainer.gpus == gpus
        assert max(plan.trainer.peak, engine) <= memory * 1.001
    assert plan.engine.kv_tokens >= 8 * 4096 and 0 < plan.engine.mem_fraction_static < 1
    assert plan.reasons
    json.dumps(plan.to_json())


def test_fewest_shards_that_fit(tmp_path: Path) -> None:
    small, large = (plan_for(tmp_path, name, 16).trainer for name in ("llama-8b", "llama-70b"))
    assert small is not None and small.shape.shards == 1 and small.replicas == 15
    assert large is not None and large.shape.shards > 1


@pytest.mark.parametrize(
    ("name", "gpus", "gpu", "context", "problem"),
    [
        ("llama-70b", 1, "H100-80", 4096, r"the engine needs \d+ GiB on each of 1 H100-80, which has 72 GiB to use"),
        ("llama-8b", 1, "L4-24", 4096, r"the engine needs 2\d GiB on each of 1 L4-24, which has 20 GiB to use"),
        ("llama-8b", 1, "A100-40", 4096, r"an update needs \d+ GiB on each of 1 A100-40, .* beside the engine"),
        ("llama-70b", 5, "A100-80", 4096, r"an update needs \d+ GiB on each of 1 A100-80, which has 71 GiB to use"),
    ],
)
def test_what_does_not_fit_is_said_with_what_to_change(
    tmp_path: Path, name: str, gpus: int, gpu: str, context: int, problem: str
) -> None:
    plan = plan_for(tmp_path, name, gpus, gpu, context)
    assert plan.trainer is None
    assert len(plan.problems) == 1
    assert re.search(problem, plan.problems[0]), plan.problems[0]
    assert "take more or larger GPUs, a shorter --context" in plan.problems[0]


def test_time_of_an_update(tmp_path: Path) -> None:
    """The operations of 150 k tokens: GPU-seconds on an H100 at a quarter of its peak."""
    model, _ = describe(tmp_path, "qwen2.5-7b", rank=16)
    per_token = flops_per_token(model, GRPO, activation_checkpointing=True)
    assert per_token == 10 * model.matmul_parameters
    with_critic = Work(150_000, 1, has_critic=True)
    assert flops_per_token(model, with_critic, activation_checkpointing=True) == 18 * model.matmul_parameters
    h100, shape = find_gpu("H100-80"), UpdateShape(1, 8192, True)
    alone = update_seconds(model, GRPO, shape, 1, h100)
    assert alone == pytest.approx(43, rel=0.03)
    assert update_seconds(model, GRPO, shape, 4, h100) == pytest.approx(alone / 4)
    shared = update_seconds(model, GRPO, UpdateShape(8, 8192, True), 8, h100)
    far = update_seconds(model, GRPO, UpdateShape(16, 8192, True), 16, h100)
    assert far - alone / 16 > shared - alone / 8 > 0  # gathering takes time, and more of it between hosts


def test_update_that_takes_too_long_and_a_slow_delivery_are_said(tmp_path: Path) -> None:
    plan = plan_for(tmp_path, "llama-70b", 8, work=Work(150_000, 3, False))
    assert plan.trainer is not None and plan.trainer.seconds > 60
    assert any("GPUs for the trainer would keep up" in problem for problem in plan.problems)
    _, spec = describe(tmp_path, "llama-70b", rank=16)
    assert delivery_ms(spec, cores=8) > 300
    assert any("a version is delivered in about" in problem for problem in plan.problems)


def test_unknown_gpu_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"did you mean 'H100-80'\? Known are H200-141, H100-80"):
        find_gpu("H100")
