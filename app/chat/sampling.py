"""The sampling parameters of a chat request: their limits, and which of them exclude a turn from training."""

from app.chat import tasks
from app.chat.request_context import RequestContext
from app.chat.schemas import SEED_LIMIT, ChatRequest
from app.chat.wire_details import NO_DETAILS, WireDetails
from app.core.errors import BadRequest
from app.core.settings import Settings
from app.inference.request import Sampling
from app.projects.auth import Caller
from app.projects.service import NO_CONSENT, withholds_consent

MIN_TEMPERATURE = 1e-5  # SGLang decodes greedily below 1e-6, and the trainer divides by the temperature


def to_sampling(request: ChatRequest, settings: Settings, details: WireDetails = NO_DETAILS) -> Sampling:
    """Return the engine's sampling parameters. Raises BadRequest when the request exceeds a limit of the settings."""
    if request.n > settings.limits.max_choices:
        raise BadRequest(f"'n' may be at most {settings.limits.max_choices}.", param="n", code="invalid_value")
    max_tokens = request.max_output_tokens
    cap = settings.limits.max_output_tokens
    if max_tokens is not None and details.clamps_max_tokens:
        max_tokens = min(max_tokens, cap // request.n)
    if max_tokens is not None and max_tokens * request.n > cap:
        param = "max_completion_tokens" if request.max_completion_tokens else "max_tokens"
        error = f"One request may ask for at most {cap} tokens over all choices."
        raise BadRequest(error, param=param, code="invalid_value")
    sizes = request.prompt_chars
    limit = settings.limits.max_prompt_chars
    if (length := sum(sizes.values())) > limit:
        longest = max(sizes, key=sizes.__getitem__)
        error = f"Messages, tools and response format hold {length} characters; at most {limit} are "
        raise BadRequest(f"{error}allowed. Shorten '{longest}'.", param=longest, code="context_length_exceeded")
    return Sampling(
        max_tokens=max_tokens or min(settings.server.default_max_tokens, cap // request.n),
        temperature=request.temperature,
        top_p=request.top_p,
        top_k=details.top_k or -1,
        stop=request.stop_strings,
        seed=request.seed,
        frequency_penalty=request.frequency_penalty,
        presence_penalty=request.presence_penalty,
        logit_bias=request.logit_bias or None,
    )


def next_seed(seed: int, index: int) -> int:
    """Return the seed of another choice; the first one follows the last one."""
    return (seed + index + SEED_LIMIT) % (2 * SEED_LIMIT) - SEED_LIMIT


def exclusion_reason(
    caller: Caller, context: RequestContext, sampling: Sampling, sampled_turn_id: str | None
) -> str | None:
    """Return why these turns must not be trained on, as far as the request tells, or None.

    The engine's log-probs account for the temperature only: any other change of the distribution makes them differ
    from the probabilities that the tokens were sampled with.
    """
    if withholds_consent(context.request.metadata) or not caller.train:
        return NO_CONSENT
    if context.task is not None:
        return tasks.exclusion_reason(context.task)
    if sampled_turn_id is not None:
        return f"its client repeated the request after {sampled_turn_id}, which is already a sample"
    if sampling.temperature < MIN_TEMPERATURE:
        return "greedy decoding: the reply was not sampled"
    if sampling.top_p < 1 or sampling.top_k > 0:
        return "top-p or top-k truncated the sampling distribution"
    if sampling.frequency_penalty or sampling.presence_penalty:
        return "penalties changed the sampling distribution"
    return "a logit bias changed the sampling distribution" if sampling.logit_bias else None
