"""The interface of policy losses: what a loss per token is computed from, what it returns, and the losses by name.

A loss of another package is a function with the decorator `register_policy_loss`. Settings name it as
`module:function`, or by the entry point of the group `attune.policy_losses` that leads to it.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import TypeVar

from pydantic import BaseModel
from torch import Tensor

from alignment.config.policy_gradient_algorithms import POLICY_LOSS_ENTRY_POINTS, PolicyGradientConfig
from alignment.errors import UnknownExtension
from alignment.extensions import load_extension
from alignment.functional.aggregation import apply_mask, check_same_shape
from alignment.functional.importance import clamp_log_ratio
from alignment.types import Metric


@dataclass(frozen=True)
class TokenLossInputs:
    """What a token loss is computed from: [B, T] each, 0 in the padding. Log-probs and entropy carry a gradient.

    `old_logprobs_BT` are those of the proximal policy, which ratios refer to; the trainer corrects for the difference
    between it and the policy that sampled the tokens.
    """

    logprobs_BT: Tensor
    old_logprobs_BT: Tensor
    rollout_logprobs_BT: Tensor
    advantages_BT: Tensor
    response_mask_BT: Tensor
    ref_logprobs_BT: Tensor | None = None  # with needs_reference, or where the KL to the base model is computed
    entropy_BT: Tensor | None = None  # with needs_entropy, or where there is an entropy bonus

    @property
    def ratio_BT(self) -> Tensor:
        """Return exp(clamp(log π − log old, ±20))."""
        return clamp_log_ratio(self.logprobs_BT - self.old_logprobs_BT).exp()


@dataclass(frozen=True)
class TokenLoss:
    """A loss per token, [B, T], and metrics by name: one value per token, whose mean is reported, or a `Metric`.

    What they hold in the padding does not matter.
    """

    loss_BT: Tensor
    metrics: Mapping[str, Tensor | Metric] = field(default_factory=dict)


@dataclass(frozen=True)
class RegisteredLoss:
    """A policy loss with the type of its parameters, and what it needs besides log-probs and advantages."""

    function: Callable[..., TokenLoss]
    params: type[BaseModel] | None
    needs_reference: bool
    needs_entropy: bool

    def bind(
        self, settings: Mapping[str, object], loss_params: Mapping[str, object] = MappingProxyType({})
    ) -> Callable[[TokenLossInputs], TokenLoss]:
        """Return the loss with its parameters: those of `loss_params`, and those that all policy gradients have.

        Raises ValueError for parameters that do not fit.
        """
        if self.params is None:
            if loss_params:
                raise ValueError(f"the policy loss has no parameters, but loss_params has {', '.join(loss_params)}")
            return self.function
        shared = {name: settings[name] for name in self.params.model_fields if name in settings}
        params, function = self.params.model_validate({**shared, **loss_params}, extra="forbid"), self.function
        return lambda inputs: function(inputs, params)


POLICY_LOSSES: dict[str, RegisteredLoss] = {}
LossFunction = TypeVar("LossFunction", bound=Callable[..., TokenLoss])


def register_policy_loss(
    name: str, params: type[BaseModel] | None = None, *, needs_reference: bool = False, needs_entropy: bool = False
) -> Callable[[LossFunction], LossFunction]:
    """Return a decorator that makes a function of `TokenLossInputs` a policy loss of this name.

    With `params` the function gets an instance of that type as its second argument. A parameter with the name of a
    setting of policy gradients, such as `clip_low`, is that setting and has no default of its own; the others are set
    in `loss_params`. Raises ValueError for a name that another function has.

    Example: @register_policy_loss("reinforce")
             def reinforce(inputs): return TokenLoss(-inputs.advantages_BT * inputs.logprobs_BT)
    """
    for field_name, info in params.model_fields.items() if params else ():
        if field_name in PolicyGradientConfig.model_fields and not info.is_required():
            raise ValueError(f"{field_name} is a setting of every policy gradient, so it must not have a default here")

    def register(function: LossFunction) -> LossFunction:
        registered = POLICY_LOSSES.get(name)
        if registered is not None and _origin(registered.function) != _origin(function):
            raise ValueError(f"there is a policy loss {name!r} already: {'.'.join(_origin(registered.function))}")
        POLICY_LOSSES[name] = RegisteredLoss(function, params, needs_reference, needs_entropy)
        return function

    return register


def load_policy_loss(name: str) -> RegisteredLoss:
    """Return the policy loss with a registered name, of an entry point, or at `module:function`.

    Raises UnknownExtension, which lists the known names.
    """
    if name in POLICY_LOSSES:
        return POLICY_LOSSES[name]
    function = load_extension(name, POLICY_LOSS_ENTRY_POINTS, POLICY_LOSSES, noun="policy loss")
    for registered in POLICY_LOSSES.values():
        if registered.function is function:
            return registered
    raise UnknownExtension(f"{name!r} is {function!r}, which has no decorator register_policy_loss.")


def weighted_token_loss(
    loss: Callable[[TokenLossInputs], TokenLoss], inputs: TokenLossInputs, weights_BT: Tensor | None
) -> TokenLoss:
    """Return the loss times the weights (1 if None), computed from inputs that are 0 in the padding.

    Raises ValueError for mismatched shapes.
    """
    tensors = {name: tensor for name, tensor in vars(inputs).items() if tensor is not None}
    check_same_shape(**tensors)
    mask_BT = tensors.pop("response_mask_BT")
    with_gradient = ("logprobs_BT", "entropy_BT")
    masked = {
        name: apply_mask(tensor if name in with_gradient else tensor.detach(), mask_BT)
        for name, tensor in tensors.items()
    }
    result = loss(TokenLossInputs(**masked, response_mask_BT=mask_BT))
    check_same_shape(response_mask_BT=mask_BT, loss_BT=result.loss_BT)
    if weights_BT is None:
        return result
    check_same_shape(logprobs_BT=inputs.logprobs_BT, rollout_weights_BT=weights_BT)
    return replace(result, loss_BT=result.loss_BT * apply_mask(weights_BT.detach(), mask_BT))


def _origin(function: Callable[..., object]) -> tuple[str, str]:
    return function.__module__, function.__qualname__
