"""Credit along a conversation: what a turn is worth for the turns after it."""

import torch
from torch import Tensor

from alignment.errors import AlignmentError
from alignment.functional.arguments import same_shape


@torch.no_grad()
def turn_credit(rewards_B: Tensor, conversation_B: Tensor, turn_B: Tensor, discount: float) -> Tensor:
    """G = r + discount · G(the next turn of the same conversation that is in the batch).  [B] → [B].

    `conversation_B` and `turn_B` are integers: which conversation, and the turn's place in it; the order within the
    batch is of no matter. Turns that are missing are passed over, without a discount for the gap. With discount 0
    every turn keeps its own reward. The usual discounted return (Sutton & Barto, 2018, §3.3), with turns as steps.
    Raises AlignmentError where one turn occurs twice (two candidates): which of them led on is not known.
    """
    same_shape(rewards_B=rewards_B, conversation_B=conversation_B, turn_B=turn_B)
    if discount == 0:
        return rewards_B.clone()
    rewards = rewards_B.tolist()
    places = list(zip(conversation_B.tolist(), turn_B.tolist(), strict=True))
    credit = [0.0] * len(rewards)
    later: tuple[int, int] | None = None
    value = 0.0
    for index in sorted(range(len(places)), key=places.__getitem__, reverse=True):
        conversation, turn = places[index]
        if places[index] == later:
            raise AlignmentError(f"turn {turn} of conversation {conversation} occurs twice: which of them led on?")
        follows = later is not None and later[0] == conversation
        value = rewards[index] + (discount * value if follows else 0.0)
        credit[index] = value
        later = places[index]
    return torch.tensor(credit, dtype=rewards_B.dtype, device=rewards_B.device)
