"""Penalties on the length of a reply. The trainer and the reward sources use the same functions."""


def length_penalty(length: int, shortest: int, longest: int) -> float:
    """Return 0 within [shortest, longest] tokens, else −((distance to the range) / (width of the range))², at least −1.

    Example: with a range of 30 to 80 a reply of 105 tokens gets −(25 / 50)² = −0.25
    """
    distance = max(shortest - length, length - longest, 0)
    return 0.0 - min(1.0, (distance / (longest - shortest)) ** 2)


def overlong_penalty(length: int, longest: int, buffer: int) -> float:
    """Return DAPO's soft punishment (Yu et al., 2025, eq. 13): 0 up to longest − buffer, then linear to −1 at longest.

    Example: with longest 80 and buffer 20 a reply of 70 tokens gets −0.5
    """
    return 0.0 - min(1.0, max(0, length - (longest - buffer)) / buffer)
