"""OpenEnv servers of the tests: ``uvicorn lake_server:app``, ``:wide`` and ``:slow``."""

from __future__ import annotations

import time
from typing import Any

from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app

from lake import Lake, read_way


class SayAction(Action):
    text: str


class Seen(Observation):
    field: str


class LakeServer(Environment):
    """The walk of tests/lake.py."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed: int | None = None, episode_id: str | None = None, start: str = "", **given: Any) -> Seen:
        self.lake = Lake(seed or 0)
        return Seen(field=f"{start} {self.lake.place}")

    def step(self, action: SayAction, **given: Any) -> Seen:
        if action.text == "raise":
            raise RuntimeError("the ice broke")
        if (way := read_way(action.text)) < 4:
            return Seen(field=self.lake.move(way))
        return Seen(field="", reward=self.lake.reward, done=True)

    @property
    def state(self) -> State:
        return State()


class MoveAction(Action):
    way: int
    speed: int


class Wide(Observation):
    row: int
    column: int


class WideServer(LakeServer):
    """Needs encode and decode."""

    def reset(self, seed: int | None = None, episode_id: str | None = None, **given: Any) -> Wide:
        return Wide(row=0, column=0)

    def step(self, action: MoveAction, **given: Any) -> Wide:
        return Wide(row=action.way, column=action.speed, reward=1.0, done=action.speed > 1)


class SlowServer(LakeServer):
    def step(self, action: SayAction, **given: Any) -> Seen:
        time.sleep(3.0 if action.text == "slow" else 0.0)
        return Seen(field="late", done=True)


app = create_fastapi_app(LakeServer, SayAction, Seen, max_concurrent_envs=3)
wide = create_fastapi_app(WideServer, MoveAction, Wide, max_concurrent_envs=3)
slow = create_fastapi_app(SlowServer, SayAction, Seen, max_concurrent_envs=3)
app.mount("/wide", wide)
app.mount("/slow", slow)
