"""/v1/policies/{name}/votes: what became of the votes of a policy."""

from fastapi import APIRouter

from app.core.errors import ERROR_RESPONSES
from app.feedback.vote_views import VotesView, view_votes
from app.policies.context import ViewedPolicyDep

router = APIRouter(prefix="/v1/policies/{name}", tags=["training"], responses=ERROR_RESPONSES)


@router.get("/votes")
async def get_votes(context: ViewedPolicyDep) -> VotesView:
    """Count the policy's votes by what became of them. Comments and withdrawals are no votes.

    A ranking of replies, or feedback on a conversation, counts once, for the reply that came furthest. Of the votes
    that wait, a bounded number is counted (`is_limited`).
    """
    async with context.read_snapshot() as (session, policy):
        return await view_votes(session, policy)
