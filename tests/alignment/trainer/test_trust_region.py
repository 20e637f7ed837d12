"""The size of an update is fitted to a KL target."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from alignment.trainer.trust_region import AIM, MAX_MEASUREMENTS, MAX_SCALE, MIN_SHARE, FittedStep, TrustRegion

TARGET = 0.01


def make_update(size: float) -> tuple[TrustRegion, list[Tensor]]:
    """Return a trust region, and parameters that an update has moved from 1 to 1 + `size`."""
    parameters = [torch.ones(3), torch.ones(2, 2)]
    region = TrustRegion(parameters, TARGET)
    for parameter in parameters:
        parameter += size
    return region, parameters


def kl_of(parameters: list[Tensor], power: float = 2.0) -> Callable[[], float]:
    """Return a measurement for which KL is the displacement to the power of 2, as it is for small displacements."""
    return lambda: float((parameters[0][0] - 1.0).abs() ** power)


@pytest.mark.parametrize("size", [0.06, 0.09, 0.0999])
def test_update_within_the_target_is_left_as_it_is(size: float) -> None:
    region, parameters = make_update(size)
    fitted = region.fit(kl_of(parameters))
    assert fitted.scale == 1.0 and fitted.measurements == 1
    assert torch.equal(parameters[0], torch.ones(3) + size)


@pytest.mark.parametrize("size", [0.11, 0.3, 1.0, 40.0])
@pytest.mark.parametrize("power", [1.0, 2.0, 4.0])
def test_update_that_is_too_large_is_scaled_down(size: float, power: float) -> None:
    region, parameters = make_update(size)
    measure = kl_of(parameters, power)
    fitted = region.fit(measure)
    if fitted.scale:
        assert 0.0 < fitted.kl <= TARGET
        assert math.isclose(fitted.kl, measure(), rel_tol=1e-3), "the parameters are those of the returned scale"
        for parameter in parameters:
            torch.testing.assert_close(parameter, torch.ones_like(parameter) + fitted.scale * size)
    assert fitted.scale or (power, size) == (1.0, 40.0), "only the worst case needs more measurements than allowed"


@pytest.mark.parametrize("size", [0.001, 0.01, 0.03, 0.05])
def test_update_that_is_far_too_small_is_scaled_up(size: float) -> None:
    region, parameters = make_update(size)
    fitted = region.fit(kl_of(parameters))
    assert fitted.scale > 1.0 and MIN_SHARE * TARGET <= fitted.kl <= TARGET


def test_update_is_scaled_up_by_a_bounded_factor() -> None:
    region, parameters = make_update(1e-6)
    assert region.fit(lambda: 0.0).scale == MAX_SCALE
    torch.testing.assert_close(parameters[0], torch.ones(3) + MAX_SCALE * 1e-6)


@pytest.mark.parametrize("size", [0.001, 0.05, 0.08, 0.3])
def test_update_that_must_not_be_enlarged_is_only_scaled_down(size: float) -> None:
    region, parameters = make_update(size)
    fitted = region.fit(kl_of(parameters), may_enlarge=False)
    assert fitted.scale == 1.0 or size == 0.3
    assert fitted.kl <= TARGET and (size < 0.08 or fitted.kl >= MIN_SHARE * TARGET)
    torch.testing.assert_close(parameters[0], torch.ones(3) + fitted.scale * size)


@pytest.mark.parametrize("kl", [math.inf, math.nan])
def test_update_that_is_not_finite_is_scaled_down(kl: float) -> None:
    region, parameters = make_update(1.0)
    fitted = region.fit(lambda: kl if parameters[0][0] > 1.05 else 0.005)
    assert fitted.scale == pytest.approx(0.01) and fitted.kl == 0.005


def test_update_that_never_fits_is_undone() -> None:
    region, parameters = make_update(1.0)
    fitted = region.fit(lambda: 1.0)
    assert fitted.scale == 0.0 and fitted.measurements == MAX_MEASUREMENTS
    assert all(torch.equal(parameter, torch.ones_like(parameter)) for parameter in parameters)


def test_a_scale_that_fits_is_kept_when_a_larger_one_does_not() -> None:
    region, parameters = make_update(0.02)
    fitted = region.fit(lambda: 0.0005 if parameters[0][0] < 1.021 else 0.5)  # KL that rises steeply
    assert fitted.scale >= 1.0 and fitted.kl == 0.0005
    torch.testing.assert_close(parameters[0], torch.ones(3) + fitted.scale * 0.02)


@pytest.mark.parametrize("exponent", [0.5, 0.8, 1.0, 1.5, 2.0])
def test_three_or_four_measurements_suffice_however_kl_grows(exponent: float) -> None:
    """KL grew with the 0.8th power of the scale in an update that has been measured."""
    region, parameters = make_update(1.0)
    fitted = region.fit(lambda: 2.15 * TARGET * float(parameters[0][0] - 1) ** exponent)
    assert MIN_SHARE * TARGET <= fitted.kl <= TARGET and fitted.measurements <= 4


@pytest.mark.parametrize("exponent", [4.0, 8.0])
def test_update_is_enlarged_where_kl_grows_faster_than_expected(exponent: float) -> None:
    region, parameters = make_update(1.0)
    fitted = region.fit(lambda: 1e-3 * TARGET * float(parameters[0][0] - 1) ** exponent)
    assert 0.1 * TARGET <= fitted.kl <= TARGET and fitted.scale > 1


@pytest.mark.parametrize("rate", [1e-5, 1e-4, 1e-3, 1e-2, 1.0])
def test_rate_arrives_at_the_same_size_of_update_from_above_and_from_below(rate: float) -> None:
    """A KL anywhere between the target and 0.3 of it is no reason to scale an update, but to adapt the rate."""
    for _ in range(16):
        region, parameters = make_update(5.0 * rate)
        fitted = region.fit(kl_of(parameters))
        rate *= fitted.lr_factor(TARGET)
    assert math.isclose(fitted.kl, AIM * TARGET, rel_tol=0.1)


def test_rate_is_a_running_mean_of_the_rates_that_fit() -> None:
    """One update that is twice too large or too small by chance moves the rate by half of that, in logarithms."""
    for scale in (0.5, 1.0, 2.0):
        factor = FittedStep(scale, AIM * TARGET, 1).lr_factor(TARGET)
        assert factor == pytest.approx(scale**0.5)
    assert FittedStep(0.2, AIM * TARGET, 1).lr_factor(TARGET) == pytest.approx(0.2), "at once, if far too large"
