"""How much of a batch a rater may give, as SQL conditions."""

from sqlalchemy import ColumnElement, func, or_

from alignment.signals import rater_trust
from app.models import Rater, RaterStanding


def is_within_allowance(position: ColumnElement[int], limit: int) -> ColumnElement[bool]:
    """Return whether a batch may take a rater's sample at this position (from 1), as a SQL condition.

    A rater gets the share of `limit` that `alignment.signals.rater_trust.rater_weight` states, and at least one place.
    The statement must have Rater joined from outside. A rater without a record counts as a newcomer, and a trusted
    rater has no limit.
    """
    alpha, beta = rater_trust.PRIOR
    agreed, disagreed = func.coalesce(Rater.agreement_weight, 0.0), func.coalesce(Rater.disagreement_weight, 0.0)
    weight = (alpha + agreed - beta - disagreed) / (alpha + beta + agreed + disagreed)
    return or_(position == 1, position <= limit * weight, is_trusted())


def is_trusted() -> ColumnElement[bool]:
    """Return whether an admin trusts the rater. The statement must have Rater joined from outside."""
    return func.coalesce(Rater.standing, "") == RaterStanding.TRUSTED
