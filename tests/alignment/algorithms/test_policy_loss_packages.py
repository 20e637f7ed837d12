"""Policy losses of other packages: the documented package is built, found by its entry point, and learns."""

import importlib
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from pydantic import BaseModel, TypeAdapter
from torch import Tensor

from alignment.algorithms import TokenLoss, TokenLossInputs, build, register_policy_loss
from alignment.algorithms.base import prepare_step
from alignment.algorithms.ppo import PPO
from alignment.config.algorithm_choice import AlgorithmConfig
from alignment.config.policy_gradient_algorithms import GRPOConfig, PPOConfig
from alignment.errors import UnknownExtension
from alignment.functional.policy_loss_registry import POLICY_LOSSES, load_policy_loss
from app.core.settings import Settings
from demo.train import MODEL
from tests.benchmarks.learning import RUNS
from tests.support.offline.experiment import Experiment
from tests.support.worked_batches import gradient, make_train_data, reduce_loss, reply

REPLIES = [reply(1.0, 2), reply(-1.0, 1)]


@pytest.fixture(autouse=True)
def registry() -> Iterator[None]:
    """Restore the registry and forget the package's module after each test."""
    registered = dict(POLICY_LOSSES)
    yield
    POLICY_LOSSES.clear()
    POLICY_LOSSES.update(registered)
    sys.modules.pop("shop_losses", None)


@pytest.fixture(scope="module")
def installed_package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build and install the package of docs/algorithms.md, and return the folder that it is in."""
    source = tmp_path_factory.mktemp("shop-losses")
    section = (Path(__file__).parents[3] / "docs" / "algorithms.md").read_text().partition("### A token loss\n")[2]
    for language, file in (("python", "shop_losses.py"), ("toml", "pyproject.toml")):
        block = re.search(f"```{language}\n(.*?)```", section, re.DOTALL)
        assert block is not None
        (source / file).write_text(block[1])
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", "install", "--no-index", "--no-deps"]
    target = source / "site-packages"
    subprocess.run([*pip, "--no-build-isolation", "--target", target, source], check=True, timeout=120)
    return target


@pytest.fixture
def shop_losses(installed_package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put the installed package on the import path."""
    monkeypatch.syspath_prepend(str(installed_package))
    importlib.invalidate_caches()


@pytest.mark.usefixtures("shop_losses")
@pytest.mark.parametrize(
    ("updates", "replies", "gain"), [(2, 24, None), pytest.param(6, 48, 0.15, marks=pytest.mark.slow)]
)
def test_documented_package_is_found_by_its_entry_point_and_learns(
    updates: int, replies: int, gain: float | None
) -> None:
    parse = TypeAdapter(AlgorithmConfig).validate_python
    algorithm = parse({"type": "ppo", "kl_coef": 0.02, "loss": "squared_ratio", "loss_params": {"tau": 0.5}})
    assert Settings(algorithm=algorithm).algorithm == algorithm
    run = RUNS["PPO, running baseline"]
    config = run.config.model_copy(update={"algorithm": algorithm, "kl_target": 0.02})
    experiment = Experiment(MODEL, replace(run, config=config, replies_per_update=replies, seed=1))
    results = [experiment.run_update() for _ in range(updates)]
    assert all(result.refused is None for result in results)
    approvals = [result.approval for result in results]
    assert gain is None or approvals[-1] > approvals[0] + gain, approvals
    metrics = results[-1].metrics
    assert 0 < metrics["squared_ratio/penalty"] < 0.1
    assert {"reference_kl", "actor/kl_loss", "actor/ppo_kl_k3", "rollout_corr/kl"} <= metrics.keys()
    assert "actor/pg_clipfrac" not in metrics


@pytest.mark.usefixtures("shop_losses")
def test_loss_of_a_package_is_aggregated_corrected_and_regularized() -> None:
    """The same batch as in test_ppo, by hand: ratio 1, so the loss is −A per token and the penalty 0."""
    rollout_logprobs_BT = torch.tensor([[-1.0 + torch.log(torch.tensor(2.0)).item(), -6.0], [-1.0, 0.0]])
    data = make_train_data(REPLIES, rollout_logprobs_BT=rollout_logprobs_BT)
    ppo = PPO(PPOConfig(whiten="off", kl_coef=0.0, loss="squared_ratio"))
    ppo.load_state_dict({"baseline": 0.0})
    prepare_step(ppo, 0, data)
    # weights parent / rollout: ½, e⁵ truncated at 2, 1; divided by the three tokens, not by the four of the tensor
    torch.testing.assert_close(gradient(ppo, data), torch.tensor([[-0.5, -2.0], [1.0, 0.0]]) / 3)
    moved_BT = torch.tensor([[-0.8, -1.0], [-1.0, 0.0]])
    metrics = reduce_loss(ppo, data, moved_BT, rows_per_micro_batch=1)[1]
    assert metrics["squared_ratio/penalty"] == pytest.approx(0.2 / 2 * 0.2**2 / 3)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        # and those that other tests have imported
        ("ppoo", "no policy loss 'ppoo'; did you mean 'ppo'. Known are .*cispo.* ppo, "),
        ("no_such_module:loss", "cannot be imported"),
        ("tests.alignment.algorithms.test_policy_loss_packages:undecorated", "no decorator register_policy_loss"),
    ],
)
def test_unknown_loss_is_refused(name: str, message: str) -> None:
    with pytest.raises(UnknownExtension, match=message):
        build(GRPOConfig(loss=name))


def undecorated(inputs: TokenLossInputs) -> TokenLoss:
    return TokenLoss(-inputs.advantages_BT * inputs.logprobs_BT)


class ClippedParams(BaseModel):
    clip_high: float
    power: int = 1


def test_parameters_are_typed_and_share_the_settings_of_policy_gradients() -> None:
    calls: list[ClippedParams] = []

    @register_policy_loss("mine", ClippedParams)
    def mine(inputs: TokenLossInputs, params: ClippedParams) -> TokenLoss:
        calls.append(params)
        return undecorated(inputs)

    data = make_train_data(REPLIES)
    ppo = PPO(PPOConfig(loss="mine", clip_high=0.5, loss_params={"power": "2"}))
    prepare_step(ppo, 0, data)
    reduce_loss(ppo, data)
    assert calls == [ClippedParams(clip_high=0.5, power=2)]
    for loss, params, message in (
        ("mine", {"pover": 2}, "pover"),
        ("mine", {"power": "two"}, "power"),
        ("reinforce", {"power": 2}, "has no parameters, but loss_params has power"),
    ):
        with pytest.raises(ValueError, match=message):
            build(PPOConfig(loss=loss, loss_params=params))
    with pytest.raises(ValueError, match="clip_high must stand beside loss_params"):
        PPOConfig(loss="mine", loss_params={"clip_high": 0.5})


def test_names_and_defaults_must_not_hide_those_that_exist() -> None:
    with pytest.raises(ValueError, match="there is a policy loss 'ppo' already"):
        register_policy_loss("ppo")(undecorated)

    class Shadowing(BaseModel):
        clip_low: float = 0.1

    with pytest.raises(ValueError, match="clip_low is a setting of every policy gradient"):
        register_policy_loss("mine", Shadowing)
    assert "mine" not in POLICY_LOSSES


def test_loss_gets_masked_inputs_and_what_it_needs() -> None:
    seen: list[TokenLossInputs] = []

    @register_policy_loss("mine", needs_reference=True)
    def mine(inputs: TokenLossInputs) -> TokenLoss:
        seen.append(inputs)
        return undecorated(inputs)

    assert load_policy_loss("mine").needs_reference
    nan_BT = torch.tensor([[-1.0, -1.0], [-1.0, float("nan")]])
    data = make_train_data(REPLIES, rollout_logprobs_BT=nan_BT)
    ppo = PPO(PPOConfig(loss="mine", kl_coef=0.0))
    assert ppo.needs_reference and not ppo.needs_entropy
    prepare_step(ppo, 0, data)
    loss, metrics = reduce_loss(ppo, data)
    assert loss.isfinite() and "actor/kl_loss" not in metrics
    (inputs,) = seen
    assert inputs.rollout_logprobs_BT.tolist() == [[-1, -1], [-1, 0]] and inputs.ref_logprobs_BT is not None


@pytest.mark.parametrize("reduction", ["sum", "mean", "replies"])
def test_loss_that_is_averaged_already_is_refused(reduction: str) -> None:
    @register_policy_loss("mine")
    def mine(inputs: TokenLossInputs) -> TokenLoss:
        loss_BT: Tensor = undecorated(inputs).loss_BT
        return TokenLoss({"sum": loss_BT.sum(), "mean": loss_BT.mean(), "replies": loss_BT.sum(-1)}[reduction])

    data = make_train_data(REPLIES)
    ppo = PPO(PPOConfig(loss="mine"))
    prepare_step(ppo, 0, data)
    with pytest.raises(ValueError, match=r"shapes do not match: response_mask_BT \[2, 2\], loss_BT"):
        reduce_loss(ppo, data)
