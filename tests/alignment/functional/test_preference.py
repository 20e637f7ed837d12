"""Losses on pairs and on binary labels: examples by hand and plain Python, gradients included."""

import math
from typing import Any, get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from alignment.config.preference_algorithms import PairKind, UnpairedKind
from alignment.functional import dpo_loss, kto_loss

PAIR_KINDS, UNPAIRED_KINDS = get_args(PairKind), get_args(UnpairedKind)
# log-ratios to the reference: 2 for the chosen, −1 for the rejected
PAIR = (torch.tensor([-3.0]), torch.tensor([-9.0]), torch.tensor([-5.0]), torch.tensor([-8.0]))
LENGTHS: dict[str, Any] = {"chosen_length_P": torch.tensor([2]), "rejected_length_P": torch.tensor([1])}


@pytest.mark.parametrize(
    ("kind", "options", "loss"),
    [
        ("sigmoid", {}, 0.2014133),  # log(1 + e^−1.5), βd = ½·3
        ("sigmoid", {"label_smoothing": 0.1}, 0.3514133),  # 0.9·0.2014133 + 0.1·1.7014133
        ("robust", {"label_smoothing": 0.1}, 0.0139133),  # (0.9·0.2014133 − 0.1·1.7014133)/0.8
        ("robust", {}, 0.2014133),
        ("hinge", {}, 0.0),  # 1 − 1.5
        ("hinge", {"beta": 0.1}, 0.7),
        ("ipo", LENGTHS, 1.0),  # (2/2 + 1/1 − 1)²
        ("ipo", {**LENGTHS, "beta": 0.1}, 9.0),  # (2 − 5)²
        ("apo_zero", {}, 0.6464821),  # 1 − σ(1) + σ(−½)
        ("apo_down", {}, 0.9134841),  # σ(1) + 1 − σ(1.5)
    ],
)
def test_pairs_by_hand(kind: PairKind, options: dict[str, Any], loss: float) -> None:
    actual = dpo_loss(*PAIR, kind=kind, **{"beta": 0.5, **options})
    beta = options.get("beta", 0.5)
    assert actual.loss_P.tolist() == pytest.approx([loss], abs=1e-6)
    assert (actual.chosen_rewards_P.item(), actual.rejected_rewards_P.item()) == pytest.approx((2 * beta, -beta))


def test_default_beta_and_kl() -> None:
    assert dpo_loss(*PAIR).loss_P.item() == pytest.approx(math.log(1 + math.exp(-0.3)))
    # 1 − σ(0.2) and σ(0.2)
    assert kto_loss(LOGPS_B, REF_B, UP_B).loss_B.tolist() == pytest.approx([0.4501660, 0.5498340])


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def expected_pair_result(
    kind: str, better: float, worse: float, beta: float, smoothing: float
) -> tuple[float, float, float]:
    """Return the loss and its derivatives by the log-probs of the chosen and the rejected reply (lengths 4 and 3)."""
    x = beta * (better - worse)
    if kind == "sigmoid":
        loss = -(1 - smoothing) * math.log(sigmoid(x)) - smoothing * math.log(sigmoid(-x))
        slope = beta * (sigmoid(x) - (1 - smoothing))
    elif kind == "robust":
        loss = (-(1 - smoothing) * math.log(sigmoid(x)) + smoothing * math.log(sigmoid(-x))) / (1 - 2 * smoothing)
        slope = -beta * ((1 - smoothing) * (1 - sigmoid(x)) + smoothing * sigmoid(x)) / (1 - 2 * smoothing)
    elif kind == "hinge":
        loss, slope = max(0.0, 1 - x), -beta if x < 1 else 0.0
    elif kind == "ipo":
        gap = better / 4 - worse / 3 - 1 / (2 * beta)
        return gap**2, 2 * gap / 4, -2 * gap / 3
    else:
        c, j = beta * better, beta * worse
        slope = sigmoid(c) * (1 - sigmoid(c)) * beta
        if kind == "apo_zero":
            return 1 - sigmoid(c) + sigmoid(j), -slope, sigmoid(j) * (1 - sigmoid(j)) * beta
        difference_slope = sigmoid(x) * (1 - sigmoid(x)) * beta
        return sigmoid(c) + 1 - sigmoid(x), slope - difference_slope, difference_slope
    return loss, slope, -slope


def log_probs(count: int) -> st.SearchStrategy[Tensor]:
    numbers = st.lists(st.floats(-30, 0), min_size=count, max_size=count)
    return numbers.map(lambda values: torch.tensor(values, dtype=torch.float64))


@pytest.mark.parametrize("kind", PAIR_KINDS)
@given(replies=st.lists(log_probs(4), min_size=1, max_size=4), beta=st.floats(0.05, 1), smoothing=st.floats(0, 0.4))
def test_pairs_agree_with_plain_python(kind: PairKind, replies: list[Tensor], beta: float, smoothing: float) -> None:
    chosen_P, rejected_P, ref_chosen_P, ref_rejected_P = torch.stack(replies, dim=1)
    smoothing = smoothing if kind in ("sigmoid", "robust") else 0.0
    chosen_P, rejected_P = chosen_P.clone().requires_grad_(), rejected_P.clone().requires_grad_()
    actual = dpo_loss(
        chosen_P,
        rejected_P,
        ref_chosen_P,
        ref_rejected_P,
        beta=beta,
        kind=kind,
        label_smoothing=smoothing,
        chosen_length_P=torch.full(chosen_P.shape, 4),
        rejected_length_P=torch.full(chosen_P.shape, 3),
    )
    actual.loss_P.sum().backward()
    assert chosen_P.grad is not None
    assert rejected_P.grad is not None
    for p in range(len(replies)):
        better, worse = (chosen_P - ref_chosen_P)[p].item(), (rejected_P - ref_rejected_P)[p].item()
        expected = expected_pair_result(kind, better, worse, beta, smoothing)
        if kind == "hinge" and abs(beta * (better - worse) - 1) < 1e-9:
            continue  # not differentiable: both one-sided slopes are valid
        result = (actual.loss_P[p].item(), chosen_P.grad[p].item(), rejected_P.grad[p].item())
        assert result == pytest.approx(expected, abs=1e-9, rel=1e-9)
        assert actual.chosen_rewards_P[p].item() == pytest.approx(beta * better)
        assert actual.rejected_rewards_P[p].item() == pytest.approx(beta * worse)


@pytest.mark.parametrize("kind", PAIR_KINDS)
def test_extreme_pair_is_finite_in_float32(kind: PairKind) -> None:
    for margin in (-2000.0, 2000.0):
        chosen_P = torch.tensor([margin], requires_grad=True)
        zero_P = torch.zeros(1)
        actual = dpo_loss(
            chosen_P, zero_P, zero_P, zero_P, beta=1.0, kind=kind, chosen_length_P=zero_P, rejected_length_P=zero_P
        )
        actual.loss_P.sum().backward()
        assert chosen_P.grad is not None
        assert actual.loss_P.isfinite().all()
        assert chosen_P.grad.isfinite().all()


def test_rewards_and_references_carry_no_gradient() -> None:
    sums_P = [torch.randn(3, requires_grad=True) for _ in range(4)]
    actual = dpo_loss(sums_P[0], sums_P[1], sums_P[2], sums_P[3])
    actual.loss_P.sum().backward()
    assert [tensor.grad is None for tensor in sums_P] == [False, False, True, True]
    assert not actual.chosen_rewards_P.requires_grad
    assert not actual.rejected_rewards_P.requires_grad


@pytest.mark.parametrize("kind", ["hinge", "ipo", "apo_zero", "apo_down"])
def test_unsupported_label_smoothing_is_rejected(kind: PairKind) -> None:
    with pytest.raises(ValueError, match=f"{kind} does not support label_smoothing"):
        dpo_loss(*PAIR, kind=kind, label_smoothing=0.1, **LENGTHS)


def test_invalid_pairs_are_rejected() -> None:
    with pytest.raises(ValueError, match="'orpo': one of sigmoid, ipo, hinge, robust, apo_zero, apo_down"):
        dpo_loss(*PAIR, kind="orpo")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="needs both lengths"):
        dpo_loss(*PAIR, kind="ipo", chosen_length_P=torch.tensor([2]))
    with pytest.raises(ValueError, match=r"rejected_length_P \[2\]"):
        dpo_loss(*PAIR, kind="ipo", chosen_length_P=torch.tensor([2]), rejected_length_P=torch.tensor([2, 2]))
    with pytest.raises(ValueError, match=r"not 0\.5"):
        dpo_loss(*PAIR, kind="robust", label_smoothing=0.5)
    with pytest.raises(ValueError, match=r"ref_rejected_P \[2\]"):
        dpo_loss(*PAIR[:3], torch.zeros(2))


LOGPS_B, REF_B, UP_B = torch.tensor([-3.0, -3.0]), torch.tensor([-5.0, -5.0]), torch.tensor([True, False])


@pytest.mark.parametrize(
    ("options", "losses"),
    [
        ({"kl": 1.0}, [0.3775407, 0.6224593]),  # 1 − σ(½·(2 − 1)), 1 − σ(½·(1 − 2))
        ({"kl": torch.tensor(1.0)}, [0.3775407, 0.6224593]),
        ({"kl": -4.0}, [0.2689414, 0.7310586]),  # a KL below 0 counts as 0: 1 − σ(1), 1 − σ(−1)
        ({"kl": 1.0, "desirable_weight": 2.0, "undesirable_weight": 3.0}, [0.7550813, 1.8673780]),
        ({"kl": 1.0, "kind": "apo_zero_unpaired"}, [0.2689414, 0.7310586]),  # 1 − σ(1), σ(1), whatever the KL
    ],
)
def test_kto_by_hand(options: dict[str, Any], losses: list[float]) -> None:
    actual = kto_loss(LOGPS_B, REF_B, UP_B, beta=0.5, **options)
    assert actual.loss_B.tolist() == pytest.approx(losses, abs=1e-6)
    assert actual.rewards_B.tolist() == [1.0, 1.0]


@pytest.mark.parametrize("kind", UNPAIRED_KINDS)
@given(
    labels=st.lists(st.tuples(st.floats(-30, 0), st.floats(-30, 0), st.booleans()), min_size=1, max_size=5),
    kl=st.floats(-1, 3),
    beta=st.floats(0.05, 1),
)
def test_kto_agrees_with_plain_python(kind: UnpairedKind, labels: Any, kl: float, beta: float) -> None:
    logps, refs, desirable = zip(*labels, strict=True)
    logps_B = torch.tensor(logps, dtype=torch.float64, requires_grad=True)
    actual = kto_loss(
        logps_B,
        torch.tensor(refs, dtype=torch.float64),
        torch.tensor(desirable),
        kl=kl,
        beta=beta,
        desirable_weight=1.2,
        undesirable_weight=0.7,
        kind=kind,
    )
    actual.loss_B.sum().backward()
    assert logps_B.grad is not None
    anchor = max(kl, 0.0) if kind == "kto" else 0.0
    for i, (logp, ref, is_desirable) in enumerate(labels):
        utility = sigmoid(beta * ((logp - ref - anchor) if is_desirable else (anchor - logp + ref)))
        weight = 1.2 if is_desirable else 0.7
        slope = -weight * beta * utility * (1 - utility) * (1 if is_desirable else -1)
        assert actual.loss_B[i].item() == pytest.approx(weight * (1 - utility), abs=1e-12)
        assert logps_B.grad[i].item() == pytest.approx(slope, abs=1e-12)
        assert actual.rewards_B[i].item() == pytest.approx(beta * (logp - ref), abs=1e-12)


def test_kto_labels_may_be_numeric_and_kl_is_a_constant() -> None:
    kl = torch.tensor(1.0, requires_grad=True)
    logps_B = LOGPS_B.clone().requires_grad_()
    ref_B = REF_B.clone().requires_grad_()
    actual = kto_loss(logps_B, ref_B, torch.tensor([1, 0]), kl=kl, beta=0.5)
    assert actual.loss_B.tolist() == pytest.approx([0.3775407, 0.6224593], abs=1e-6)
    actual.loss_B.sum().backward()
    assert kl.grad is None
    assert ref_B.grad is None
    assert not actual.rewards_B.requires_grad


def test_invalid_kto_arguments_are_rejected() -> None:
    with pytest.raises(ValueError, match="'bco': one of kto, apo_zero_unpaired"):
        kto_loss(LOGPS_B, REF_B, UP_B, kind="bco")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"desirable_B \[1\]"):
        kto_loss(LOGPS_B, REF_B, UP_B[:1])
