"""Sampling: what a request may ask for, and what of it cannot be learned from."""

from app.chat.schemas import ChatRequest
from app.core.errors import BadRequest
from app.core.settings import Settings
from app.inference.request import Sampling

GREEDY_BELOW = 1e-5  # SGLang takes the likeliest token below 1e-6; the trainer divides by the temperature


def sampling_of(request: ChatRequest, settings: Settings) -> Sampling:
    """Raises BadRequest when more is asked for than one request may cost."""
    if request.n > settings.max_choices:
        raise BadRequest(f"'n' may be at most {settings.max_choices}.", param="n", code="invalid_value")
    named = request.max_completion_tokens or request.max_tokens
    cap = settings.output_token_cap
    if named is not None and named * request.n > cap:
        param = "max_completion_tokens" if request.max_completion_tokens else "max_tokens"
        told = f"One request may ask for {cap} tokens at most, over all choices."
        raise BadRequest(told, param=param, code="invalid_value")
    if (length := sum(len(str(message.content or "")) for message in request.messages)) > settings.prompt_char_cap:
        told = f"The messages hold {length} characters, and {settings.prompt_char_cap} are the most."
        raise BadRequest(told, param="messages", code="context_length_exceeded")
    return Sampling(
        max_tokens=named or min(settings.max_output_tokens, cap // request.n),
        temperature=request.temperature,
        top_p=request.top_p,
        stop=request.stops,
        seed=request.seed,
        frequency_penalty=request.frequency_penalty,
        presence_penalty=request.presence_penalty,
        logit_bias=request.logit_bias or None,
    )


def sampling_exclusion_reason(sampling: Sampling) -> str | None:
    """The engine's log-probs are those of temperature alone: what bends sampling further was not the policy's own."""
    if sampling.temperature < GREEDY_BELOW:
        return "greedy: nothing was sampled"
    if sampling.top_p < 1 or sampling.top_k > 0:
        return "top-p or top-k cut the distribution that was sampled"
    if sampling.frequency_penalty or sampling.presence_penalty:
        return "penalties bent the distribution that was sampled"
    if sampling.logit_bias:
        return "a logit bias bent the distribution that was sampled"
    return None
