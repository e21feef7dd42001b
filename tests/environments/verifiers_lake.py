"""A taskset of verifiers and its harness, which runs in this process: the game of tests/lake.py."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import verifiers.v1 as vf
from openai import AsyncOpenAI

import lake


class LakeData(vf.TaskData):
    seed: int


class LakeState(vf.State):
    place: int = 0


class LakeTask(vf.Task[LakeData, LakeState]):
    @vf.reward
    async def place(self, trace: vf.Trace) -> float:
        return trace.state.place / 15

    @vf.reward(weight=0.0)
    async def half(self, trace: vf.Trace) -> float:
        return 0.5

    @vf.metric
    async def seed(self, task: LakeData) -> float:
        return float(task.seed)


class LakeTaskset(vf.Taskset[LakeTask]):
    def load(self) -> Iterable[LakeTask]:
        for row in (*lake.ROWS, {"start": "raise", "seed": 0}):
            yield LakeTask(LakeData(prompt=row["start"], seed=row["seed"]))


class LakeHarness(vf.Harness[vf.HarnessConfig]):
    NEEDS_CONTAINER = False
    EXECUTES_CODE = False

    async def launch(
        self, ctx: Any, trace: Any, runtime: Any, endpoint: str, secret: str, mcp_urls: Any, data: Any
    ) -> vf.ProgramResult:
        game = lake.Lake(data.seed)
        async with AsyncOpenAI(base_url=endpoint, api_key=secret, max_retries=0) as client:
            messages: list[Any] = [{"role": "user", "content": f"{data.prompt} {game.place}"}]
            while True:
                if data.prompt == "raise":
                    raise RuntimeError("the ice broke")
                answer = await client.chat.completions.create(model=ctx.model, messages=messages)
                text = answer.choices[0].message.content or ""
                trace.state.place = game.place
                if (way := lake.read_way(text)) == 4:
                    return vf.ProgramResult(exit_code=0, stdout="", stderr="")
                messages += [{"role": "assistant", "content": text}, {"role": "user", "content": game.move(way)}]


__all__ = ["LakeHarness", "LakeTaskset"]
