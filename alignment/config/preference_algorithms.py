"""Settings of the algorithms that learn from preferences: DPO on pairs of replies, KTO on single ones. Torch-free."""

from typing import Literal, Self

from pydantic import Field, model_validator

from alignment.config.algorithm import CorrectionConfig, UpdateConfig

PairKind = Literal["sigmoid", "ipo", "hinge", "robust", "apo_zero", "apo_down"]
UnpairedKind = Literal["kto", "apo_zero_unpaired"]


class DPOConfig(UpdateConfig):
    """Rafailov et al., 2023, on every pair of a group whose rewards differ by more than `min_margin`."""

    type: Literal["dpo"] = "dpo"
    beta: float = Field(default=0.5, gt=0, description="with an adapter's learning rate, 0.1 makes a policy diverge")
    kind: PairKind = Field(default="sigmoid", description="the loss of a pair of replies; sigmoid is DPO's own")
    label_smoothing: float = Field(
        default=0.0, ge=0, lt=0.5, description="assumed share of wrongly ordered pairs, for sigmoid and robust"
    )
    min_margin: float = Field(
        default=0.05, ge=0, le=2, description="replies whose rewards differ by no more than this form no pair"
    )

    @property
    def needs_groups(self) -> bool:
        return True

    @property
    def min_contrast(self) -> float:
        return self.min_margin

    @model_validator(mode="after")
    def _check_label_smoothing(self) -> Self:
        if self.label_smoothing and self.kind not in ("sigmoid", "robust"):
            raise ValueError(f"label_smoothing is for sigmoid and robust, not for {self.kind}")
        return self


class OnlineDPOConfig(DPOConfig):
    """Guo et al., 2024: the best against the worst reply of a group that the policy itself sampled."""

    type: Literal["online_dpo"] = "online_dpo"  # type: ignore[assignment]


class KTOConfig(UpdateConfig):
    """Ethayarajh et al., 2024: single binary labels. By default the weights balance the two classes."""

    type: Literal["kto"] = "kto"
    beta: float = Field(default=0.1, gt=0, description="how strongly the policy is held to the reference")
    kind: UnpairedKind = Field(default="kto", description="the loss of a single reply")
    desirable_weight: float | None = Field(
        default=None, gt=0, description="weight of liked replies; it balances the two classes when unset"
    )
    undesirable_weight: float | None = Field(
        default=None, gt=0, description="weight of disliked replies; it balances the two classes when unset"
    )
    correction: CorrectionConfig = Field(
        default=CorrectionConfig(level="sequence", high=1.0),
        description="weights of replies that another version sampled: a reply that the policy would hardly give any "
        "more counts hardly anything",
    )


class CorrectionPairsConfig(UpdateConfig):
    """DPO on corrected texts, beside the policy's own algorithm. No settings of users reach it."""

    beta: float = Field(default=0.1, gt=0)
    max_kl: float | None = None
