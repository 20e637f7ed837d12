"""The states that GiGPO compares turns in: what the agent has seen last.

Feng et al., 2025, group the steps of several attempts by the state of the environment. A recorded turn has its prompt
alone. What is new in it is the observation: the tokens after the latest turn of the episode whose prompt and reply the
prompt begins with, such as the results of the tools that this turn has called. A client that knows the state better
names it (`Sample.state_key`).
"""

from collections import defaultdict
from collections.abc import Hashable, Sequence

from alignment.types import Sample


def find_anchor_states(samples: Sequence[Sample]) -> list[int]:
    """Return an integer label of the state of each sample. Equal ones are of one group, agent and state.

    That is the state that the client has named or, without one, the newest observation: the whole prompt, of a turn
    that begins with no other turn of its episode in the batch. A named state is never equal to an observation. A sample
    without `turn_return` is in a state of its own.
    """
    episodes: dict[str | None, list[Sample]] = defaultdict(list)
    for sample in samples:
        episodes[sample.episode].append(sample)
    contexts: dict[str | None, list[tuple[int, ...]]] = {
        episode: _contexts(turns) for episode, turns in episodes.items() if episode is not None
    }
    states: dict[Hashable, int] = {}
    labels = []
    for index, sample in enumerate(samples):
        state: Hashable = index
        if sample.turn_return is not None and sample.state_key is not None:
            state = (sample.group, sample.agent, sample.state_key)
        elif sample.turn_return is not None:
            start = _seen_before(sample.prompt_ids, contexts.get(sample.episode, ()))
            state = (sample.group, sample.agent, start > 0, sample.prompt_ids[start:])
        labels.append(states.setdefault(state, len(states)))
    return labels


def _contexts(turns: Sequence[Sample]) -> list[tuple[int, ...]]:
    """Return the prompts of the turns with their replies, the longest first."""
    return sorted((turn.prompt_ids + turn.output_ids for turn in turns), key=len, reverse=True)


def _seen_before(prompt_ids: tuple[int, ...], contexts: Sequence[tuple[int, ...]]) -> int:
    """Return the length of the first of the contexts that the prompt begins with and goes on from; 0 for none."""
    for context in contexts:
        length = len(context)
        if length < len(prompt_ids) and prompt_ids[length - 1] == context[-1] and prompt_ids[:length] == context:
            return length
    return 0
