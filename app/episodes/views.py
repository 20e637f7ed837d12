"""What a request that creates an episode returns, whichever route it was sent to."""

from fastapi import Request, Response

from app.episodes.schemas import EpisodeView, NewEpisodeView


def show_with_key(
    request: Request, response: Response, view: EpisodeView, key: str, *, is_replay: bool
) -> NewEpisodeView:
    """Return the view with the episode's key and base URL. The response to a repeated request has status 200."""
    if is_replay:
        response.status_code = 200
        response.headers["idempotent-replayed"] = "true"
    base_url = f"{request.base_url}v1/episodes/{view.id}"
    return NewEpisodeView(**view.model_dump(), api_key=key, base_url=base_url)
