"""The KL guard of a policy's learning: a state machine that audits every change of its mode.

    asynchronous ──alarm──▶ synchronous ──a version goes live──▶ asynchronous
         ▲                      │ `kl_alarms` alarms in a row
         └──── resume ──── halted ◀── halt (an operator; the trainer, when the weights it starts from are damaged)

An alarm is the rejection of a version for its KL from its parent, by a gate, or in shadow; training returns to the
version that serves. In the synchronous mode only samples of the serving version are used. In the halted mode no batch
is assembled.
"""

from typing import Protocol

from app.core.database import now
from app.core.jobs import enqueue_after_commit
from app.core.settings import Settings
from app.models import AuditAction, LearningMode, Version
from app.policies.locks import LockedPolicy
from app.policies.service import audit_policy

KL_METRIC = "guard/kl"


class Control(Protocol):
    """An act on a policy's learning, such as `halt`."""

    def __call__(self, locked: LockedPolicy, *, actor: str, reason: str | None) -> None: ...


def describe_violation(version: Version, settings: Settings) -> str | None:
    """Return why the version's KL forbids publishing it, else None. A version without the metric is allowed.

    `settings` are those of the policy, here and in `raise_alarm`.
    """
    kl = version.metrics.get(KL_METRIC)
    if kl is None or kl <= settings.trainer.kl_guard:
        return None
    limit = settings.trainer.kl_guard
    return f"its KL from the parent version is {kl:.3g} per token; the limit `kl_guard` is {limit:g}"


def raise_alarm(locked: LockedPolicy, reason: str, settings: Settings) -> None:
    """Count the rejection of a version as an alarm. The caller has set the head to the version that serves."""
    policy = locked.policy
    policy.kl_alarms += 1
    if policy.mode == LearningMode.HALTED:
        return
    if policy.kl_alarms >= settings.trainer.kl_alarms:
        targets = ", ".join(
            f"{settings.trainer.update_kl_target * 0.5**number:.2g}" for number in range(policy.kl_alarms)
        )
        tried = f"smaller updates did not help (KL targets {targets} per token)"
        mode, reason = LearningMode.HALTED, f"{reason}; {policy.kl_alarms} alarms in a row: {tried}"
    else:
        mode = LearningMode.SYNCHRONOUS
    _set_mode(locked, mode, actor="guard", reason=reason)


def record_release(locked: LockedPolicy, version: str) -> None:
    """Reset the alarms after a version went live; it ends the synchronous mode. `version` is its name."""
    policy = locked.policy
    policy.kl_alarms = 0
    if policy.mode == LearningMode.SYNCHRONOUS:
        _set_mode(locked, LearningMode.ASYNCHRONOUS, actor="guard", reason=f"{version} went live")


def halt(locked: LockedPolicy, *, actor: str, reason: str | None) -> None:
    """Stop learning: the current update is finished, and no batch is assembled until `resume`."""
    _set_mode(locked, LearningMode.HALTED, actor=actor, reason=reason)


def resume(locked: LockedPolicy, *, actor: str, reason: str | None) -> None:
    """Return to the asynchronous mode and reset the alarms."""
    locked.policy.kl_alarms = 0
    _set_mode(locked, LearningMode.ASYNCHRONOUS, actor=actor, reason=reason)
    enqueue_after_commit(locked.session, "assemble")


def _set_mode(locked: LockedPolicy, mode: LearningMode, *, actor: str, reason: str | None) -> None:
    session, policy = locked
    previous = policy.mode
    if previous == mode:
        return
    policy.mode, policy.mode_reason, policy.mode_since = mode, reason, now()
    action = AuditAction(f"training.{mode}")
    audit_policy(session, policy, action, actor, reason, previous=previous, kl_alarms=policy.kl_alarms)
