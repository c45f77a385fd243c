"""An environment of verifiers' interface: the policy guesses a number, and is told that it is higher."""

import verifiers.v1 as vf


class GuessingData(vf.TaskData):
    secret: int


class GuessingTask(vf.Task[GuessingData]):
    @vf.reward(weight=0.5)
    async def found(self, trace: vf.Trace) -> float:
        if self.data.secret == 13:
            raise ValueError("nobody may know this number")
        return float(trace.last_reply.strip() == str(self.data.secret))


class GuessingEnv(vf.SingleAgentEnv):
    async def run(self, task, agents):
        async with agents.agent.interaction(task) as talk:
            segment = await talk.turn()
            for _ in range(3):
                if segment.terminated or segment.last_reply.strip() == str(task.data.secret):
                    break
                segment = await talk.turn("It is higher.")


class GuessingTaskset(vf.Taskset[GuessingTask, vf.TasksetConfig]):
    def load(self):
        return [GuessingTask(GuessingData(prompt="Guess!", secret=number), self.config.task) for number in range(1, 9)]


__all__ = ["GuessingEnv", "GuessingTaskset"]
