"""TextArena (github.com/LeonGuertler/TextArena, extra ``textarena``) as ``gymnasium.Env[str, str]`` that forks.

::

    env = TextArenaEnv("GuessTheNumber-v0")
    env = TextArenaEnv("TicTacToe-v0", num_players=2, opponent=bracketed_move)

The policy is player 0; ``opponent`` plays all others and answers within the same step. What the policy reads is what is new since its last turn, each message
with its sender in brackets, as TextArena's ``LLMObservationWrapper`` writes it; its own words are not repeated. (That wrapper gives the whole history, and
keeps that of the episode before. It and its relatives are taken off; those that change actions are kept.) Thoughts are not spoken: ``<think>..</think>`` is
left out of what the game and the opponents are told. What an opponent raises ends the episode, as what the game raises does.

The reward of a game comes at its end, between -1 and 1 in most. Fork: by copy, with the state of the generators; by replay where the game asks a model
over a network. Not every game can be made: word games need word lists of NLTK, some ask OpenRouter, some do not compile before Python 3.12; each says so.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np

from arpo_env.envs.dialogue import spoken
from arpo_env.interop.foreign import Episodes, ForeignEnv, Forks, Outcome
from arpo_env.interop.foreign_library import ProcessGenerators, check_known, load, making, uses_numpy

Opponent = Callable[[str, np.random.Generator], str]
"""What another player says to what it reads. It draws from the generator alone. An object with a state of its own is copied for each episode and fork."""

ME = 0
MAX_OPPONENT_TURNS = 1000
"""Turns of the opponents in a row after which the game counts as stuck."""
MAX_OPENINGS = 20
"""Times that a game is begun anew, with other draws of the opponents, because it ended before the policy had a turn."""

_MOVE = re.compile(r"\[(?!GAME\]|Player)[^\[\]\n]{1,40}\]")
_OFFERED = re.compile(r"(?:available|valid|legal|possible) (?:moves|actions)", re.I)


def bracketed_move(observation: str, rng: np.random.Generator) -> str:
    """A move drawn from those in square brackets in ``observation``, after its last "available moves" (or "valid", "legal", "possible") where it has one.

    An opponent for games that list the moves, such as TicTacToe. Where none is listed it says ``[pass]``, which most games punish: bring your own.
    """
    offered = list(_OFFERED.finditer(observation))
    moves = _MOVE.findall(observation[offered[-1].end() :] if offered else observation)
    return str(moves[int(rng.integers(len(moves)))]) if moves else "[pass]"


class TextArenaEnv(ForeignEnv):
    """A game of TextArena.

    Args:
        env: the id of the game. Of its variants (``-train``, ``-raw``) only what they do to actions counts.
        num_players: all players, the policy included.
        opponent: plays all others; needed where there are any.
        forks: overrules how it is forked; None: as the module says.
        error_reward: what a turn at which TextArena raises is worth; None: the trajectory is left unscored.
        config: further arguments of the game.

    ``options={"task": n}`` gives the episode of TextArena's own ``reset(seed=n)``; ``env.tasks`` are these. Raises ``ValueError`` for an unknown id, a
    wrong number of players and a game that cannot be made, ``FileNotFoundError`` for missing data.
    """

    shared = ForeignEnv.shared | {"tasks", "num_players", "_make", "_prototype", "_name", "_opponent_prototype"}

    def __init__(
        self,
        env: str,
        num_players: int = 1,
        opponent: Opponent | None = None,
        *,
        forks: Forks | None = None,
        stop_strings: Sequence[str] = (),
        error_reward: float | None = None,
        **config: Any,
    ) -> None:
        textarena = load("textarena", "textarena")
        check_known(env, load("textarena.envs.registration", "textarena").ENV_REGISTRY, "TextArena")
        if num_players > 1 and opponent is None:
            raise ValueError(f"num_players={num_players} needs an opponent=, a function (observation, rng) -> text such as bracketed_move")
        self.num_players = num_players
        self._name = env
        self.tasks = Episodes(env)
        self._make: Callable[[], Any] = partial(textarena.make, env, **config)
        self._opponent_prototype = self._opponent = opponent
        with ProcessGenerators().in_force(), making(f"TextArena's {env} for {num_players} player(s)"):
            self._prototype = self._make()
            copy.deepcopy(self._prototype).reset(num_players=num_players, seed=0)  # finds a wrong number of players and missing data now
        super().__init__(
            forks=forks or ("copy" if _copies(self._prototype) else "replay"),
            draws="both" if uses_numpy(_game(self._prototype)) else "random",
            stop_strings=stop_strings,
            error_reward=error_reward,
        )

    def _choose(self, wanted: Any) -> int:
        return self.tasks.number(wanted, self.np_random)

    def _open(self, start: int) -> tuple[str, Outcome]:
        for attempt in range(1, MAX_OPENINGS + 1):
            self._generators.seed(start)
            self._opponent = copy.deepcopy(self._opponent_prototype)
            self._opponent_rng = np.random.default_rng([start, attempt])
            with self._generators.in_force():
                env = self._renew(self._make if self.fork_support == "replay" else partial(copy.deepcopy, self._prototype))
                env.reset(num_players=self.num_players, seed=start)
            opening = self._outcome(done=False)
            if not opening.terminated:
                return self.tasks[start].id, opening
        raise RuntimeError(f"{self.tasks[start].id} ended {MAX_OPENINGS} times before the policy's first turn, the last time so: {opening.answer}")

    def _take(self, action: str) -> Outcome:
        return self._outcome(done=self._play(spoken(action)))

    def _outcome(self, *, done: bool) -> Outcome:
        """What the policy reads after the others have played, or how the game ended."""
        game = _game(self._held.env)
        answers = 0
        while not done and game.state.current_player_id != ME:
            answers += 1
            if answers > MAX_OPPONENT_TURNS:
                with self._library():
                    raise RuntimeError(f"the opponents took {MAX_OPPONENT_TURNS} turns in a row; the game does not go on")
            assert self._opponent is not None
            heard = self._heard()
            with self._foreign():
                said = self._opponent(heard, self._opponent_rng)
            done = self._play(said)
        if not done:
            return Outcome(messages=({"role": "user", "content": self._heard()},))
        with self._library():
            mine = game.state.game_info.get(ME, {})
            reason = str(mine.get("reason", ""))
            errors = (reason,) if mine.get("invalid_move") else ()
            return Outcome(reward=float((game.state.rewards or {}).get(ME, 0.0)), terminated=True, answer=reason, errors=errors)

    def _play(self, text: str) -> bool:
        """The present player says ``text``. Returns whether the game has ended."""
        env = self._held.env
        with self._library():
            for wrapper in _layers(env):
                if hasattr(type(wrapper), "action"):
                    text = wrapper.action(text)
            done, _ = _game(env).step(text)
        return bool(done)

    def _heard(self) -> str:
        """What is new to the present player."""
        game = _game(self._held.env)
        with self._library():
            player, messages = game.get_observation()
        roles = game.state.role_mapping
        return "\n".join(
            f"[{'GAME' if sender == -1 else roles.get(sender, f'Player {sender}')}] {str(message).strip()}"
            for sender, message, kind in messages
            if not (getattr(kind, "name", kind) == "PLAYER_ACTION" and (sender == player or self.num_players == 1))
        )


def _layers(env: Any) -> Iterator[Any]:
    """The chain of TextArena's wrappers down to the game."""
    yield env
    while "env" in vars(env):
        env = env.env
        yield env


def _game(env: Any) -> Any:
    *_, game = _layers(env)
    return game


def _copies(env: Any) -> bool:
    """Whether the game is one of TextArena's own and holds no client of a model."""
    game = _game(env)
    held = {type(value).__module__ for value in vars(game).values()}
    return type(game).__module__.startswith("textarena.envs.") and not any(name.startswith(("textarena.agents", "textarena.envs.utils.jury")) for name in held)
