"""Host names as settings and URLs write them."""


def normalize_host(host: str) -> str:
    """Example: "Judge.Internal." -> "judge.internal\""""
    return host.strip("[]").rstrip(".").lower()
