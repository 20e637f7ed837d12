"""TextArena: games of one player, in text. Runs in the interpreter that has the package `textarena`.

The game's messages go to the agent as they come. Its wrappers of observations, which repeat all that was said before,
are left out; those of actions are not.
"""

from __future__ import annotations

import random

import textarena

PLAYER = 0
WON = 1.0


class Games:
    """The games of one id, one for each episode."""

    def __init__(self, game_id: str, arguments: dict[str, object]) -> None:
        self._game_id = game_id
        self._pays_partly = bool(arguments.pop("partial_credit", False))
        self._arguments = arguments
        self._games: dict[str, textarena.Env] = {}
        self._new_game(0)  # shows that there is one, and that it takes the arguments and one player

    def reset(self, episode: str, task: dict[str, object]) -> dict[str, object]:
        """Start the task's game, which its seed decides."""
        self._games[episode] = self._new_game(int(str(task["seed"])))
        return {"messages": self._observe(episode)}

    def step(self, episode: str, reply: dict[str, object]) -> dict[str, object]:
        """Play the reply. The reward comes with the end: 1 for what the game pays in full, else -1."""
        is_over, _ = self._games[episode].step(action=str(reply.get("content") or ""))
        if not is_over:
            return {"messages": self._observe(episode)}
        rewards, players = self._games[episode].close()
        score = float((rewards or {}).get(PLAYER, 0.0))
        reward = score if self._pays_partly else (1.0 if score >= WON else -1.0)
        player = players.get(PLAYER, {})
        info = {"score": score, "turns": player.get("turn_count", 0), "invalid_move": bool(player.get("invalid_move"))}
        return {"reward": max(-1.0, min(1.0, reward)), "terminated": True, "info": info}

    def close(self, episode: str) -> None:
        """Forget the game."""
        self._games.pop(episode, None)

    def _new_game(self, seed: int) -> textarena.Env:
        random.seed(seed)  # games draw from the random state of the process, some of them when they are made
        game = textarena.make(self._game_id, **self._arguments)
        game.reset(num_players=1, seed=seed)
        return game

    def _observe(self, episode: str) -> list[dict[str, str]]:
        """Return what the game has said since the last reply, without the reply."""
        game = self._games[episode]
        while isinstance(game, textarena.Wrapper):
            game = game.env
        _, entries = game.get_observation()
        texts = [text for _, text, kind in entries if kind is not textarena.ObservationType.PLAYER_ACTION]
        return [{"role": "user", "content": "\n".join(texts)}]


def open_environment(name: str, arguments: dict[str, object]) -> Games:
    """Return the games with this id, such as GuessTheNumber-v0."""
    return Games(name, arguments)
