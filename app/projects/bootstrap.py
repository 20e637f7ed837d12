"""The first start: one project, one key (shown once), and one policy whose version 0 is the base model."""

from pathlib import Path

from sqlalchemy import func, select, text
from sqlalchemy.ext.asyncio import AsyncSession

from app.core.database import now
from app.models import ApiKey, Deployment, Policy, Project, Version, VersionState, new_id
from app.projects import keys

DEFAULT_PROJECT = "default"
BOOTSTRAP_LOCK = 20261121  # a PostgreSQL advisory lock


async def bootstrap(session: AsyncSession, policy_name: str, model: str, adaptation: str = "lora") -> str | None:
    """Create what is missing. Returns the key if one was created.

    Raises ValueError when the policy has another base model, or when this database holds versions of the other
    adaptation.
    """
    model = resolve_base_model(model)
    if session.get_bind().dialect.name == "postgresql":  # several processes may start at the same time
        await session.execute(text(f"SELECT pg_advisory_xact_lock({BOOTSTRAP_LOCK})"))
    project = await session.scalar(select(Project).where(Project.name == DEFAULT_PROJECT))
    if project is None:
        project = Project(id=new_id("proj"), name=DEFAULT_PROJECT)
        session.add(project)
        await session.flush()
    key: str | None = None
    if await session.scalar(select(ApiKey).where(ApiKey.project_id == project.id).limit(1)) is None:
        _, key = await keys.create(session, project.id)
    policy = await session.scalar(select(Policy).where(Policy.project_id == project.id, Policy.name == policy_name))
    if policy is None:
        await create_policy(session, project.id, policy_name, model)
    elif policy.base_model != model:
        raise ValueError(
            f"policy '{policy_name}' learns on {policy.base_model}, not on {model}: "
            "name another ATTUNE_POLICY or another ATTUNE_HOME"
        )
    await _check_adaptation(session, full=adaptation == "full")
    return key


async def _check_adaptation(session: AsyncSession, *, full: bool) -> None:
    """Raise ValueError if adapters and full weights would mix, or if several policies would have full weights.

    An adapter belongs to the base model's weights, and an engine holds the full weights of one policy only.
    """
    other = await session.scalar(
        select(Version.adapter_name).where(Version.number > 0, Version.full_weights != full).limit(1)
    )
    if other is not None:
        kind = "an adapter, not full weights" if full else "full weights, not an adapter"
        raise ValueError(f"{other} is {kind}: name another ATTUNE_HOME, or another ATTUNE_ADAPTATION")
    if full and await session.scalar(select(func.count()).select_from(Policy)) != 1:
        raise ValueError(
            "an engine holds the full weights of one policy, and this database has several policies: "
            "name another ATTUNE_HOME"
        )


def resolve_base_model(model: str) -> str:
    """Return the absolute path of a model folder; return a hub name unchanged."""
    return str(Path(model).resolve()) if Path(model).exists() else model


async def create_policy(session: AsyncSession, project_id: str, name: str, model: str) -> None:
    """Add a policy with version 0, the base model, and deploy that version."""
    policy = Policy(id=new_id("pol"), project_id=project_id, name=name, base_model=resolve_base_model(model))
    session.add(policy)
    await session.flush()
    base = Version(id=new_id("ver"), policy_id=policy.id, number=0, state=VersionState.LIVE, live_at=now())
    session.add(base)
    await session.flush()
    policy.head_version_id = base.id
    session.add(Deployment(policy_id=policy.id, version_id=base.id, changed_at=now()))
