"""Agents in a Ray cluster that start, end and are lost as a test says; Ray itself is a stand-in."""

import asyncio
import concurrent.futures
import contextlib
import sys
import types
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from megatron_rl.sidecar.hosts import ray_cluster
from megatron_rl.sidecar.hosts.ray_cluster import NoRoomInCluster, RayCluster, RayHosts
from tests.unit.test_remote_host import until


class RayError(Exception):
    """An error of Ray."""


class ActorUnavailableError(RayError):
    """An actor that Ray does not reach, and may reach again."""


class Call:
    """A method of an actor, whose calls a test answers."""

    def __init__(self) -> None:
        self.arguments: list[tuple[Any, ...]] = []
        self.answers: list[concurrent.futures.Future[Any]] = []
        self.next: object = None
        """The answer to further calls; None lets them wait."""

    def remote(self, *arguments: Any) -> Any:
        answer: concurrent.futures.Future[Any] = concurrent.futures.Future()
        self.arguments.append(arguments)
        self.answers.append(answer)
        if isinstance(self.next, Exception):
            answer.set_exception(self.next)
        elif self.next is not None:
            answer.set_result(self.next)
        return types.SimpleNamespace(future=lambda: answer)


class Actor:
    def __init__(self, options: dict[str, Any]) -> None:
        self.options = options
        self.start, self.is_running, self.end = Call(), Call(), Call()
        self.is_running.next = self.end.next = True


class Ray:
    """A cluster that gives each group its room, and lists what was asked of it."""

    def __init__(self) -> None:
        self.groups: list[list[dict[str, float]]] = []
        self.removed: list[Any] = []
        self.actors: list[Actor] = []
        self.is_open = False

    def place(self, bundles: list[dict[str, float]]) -> list[dict[str, float]]:
        self.groups.append(bundles)
        return bundles

    def make_actor(self, **options: Any) -> Any:
        def remote() -> Actor:
            self.actors.append(Actor(options))
            return self.actors[-1]

        return types.SimpleNamespace(remote=remote)

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        ray, group = types.ModuleType("ray"), types.ModuleType("ray.util.placement_group")
        strategies = types.ModuleType("ray.util.scheduling_strategies")
        errors = types.SimpleNamespace(RayError=RayError, ActorUnavailableError=ActorUnavailableError)
        named = {
            "exceptions": errors, "init": lambda **_: setattr(self, "is_open", True),
            "shutdown": lambda: setattr(self, "is_open", False),
            "remote": lambda _: types.SimpleNamespace(options=self.make_actor),
            "available_resources": lambda: {"CPU": 1.0}, "cluster_resources": lambda: {"CPU": 9.0, "GPU": 4.0},
        }  # fmt: skip
        for name, value in named.items():
            setattr(ray, name, value)
        group.placement_group, group.remove_placement_group = self.place, self.removed.append  # type: ignore[attr-defined]
        strategies.PlacementGroupSchedulingStrategy = lambda of, placement_group_bundle_index: of  # type: ignore[attr-defined]
        for module in (ray, types.ModuleType("ray.util"), group, strategies):
            monkeypatch.setitem(sys.modules, module.__name__, module)


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> Iterator[Ray]:
    made = Ray()
    made.install(monkeypatch)
    monkeypatch.setattr(ray_cluster, "_LOOK_SECONDS", 0.005)
    yield made
    assert not made.is_open
    assert made.removed == made.groups


@contextlib.asynccontextmanager
async def opened(ray: Ray, hosts: int, seconds: float = 60.0, num_devices: int = 0) -> AsyncIterator[RayCluster]:
    """Open a cluster whose agents have the addresses a:1, b:1 and so on."""
    cluster = RayCluster(RayHosts(hosts), "token", 7100, num_devices)
    context = cluster.opened(seconds)
    opening = asyncio.create_task(context.__aenter__())
    await until(lambda: len(ray.actors) == hosts)
    for actor, name in zip(ray.actors, "abc", strict=False):
        actor.start.answers[0].set_result(f"{name}:1")
    await opening
    try:
        yield cluster
    finally:
        await context.__aexit__(None, None, None)


def test_a_lost_host_gets_another_actor_in_its_own_group_and_keeps_its_address_until_that_has_one(ray):
    async def check() -> None:
        async with opened(ray, 2, num_devices=4) as cluster:
            assert ray.groups == [[{"CPU": 1.0, "GPU": 4.0}]] * 2
            assert cluster.addresses == ["a:1", "b:1"]
            assert ray.actors[1].start.arguments == [("token", 7100)]
            first, second = ray.actors
            assert (first.options["num_cpus"], first.options["num_gpus"]) == (1.0, 4.0)
            second.is_running.next = RayError("its node has died\nand more")
            await until(lambda: len(ray.actors) == 3)
            assert ray.actors[2].options["scheduling_strategy"] is ray.groups[1]
            assert cluster.addresses == ["a:1", "b:1"]
            ray.actors[2].start.answers[0].set_result("c:1")
            await until(lambda: cluster.addresses == ["a:1", "c:1"])
            asked = len(ray.actors[2].is_running.answers)
            await until(lambda: len(ray.actors[2].is_running.answers) > asked + 2)
            assert (len(ray.groups), len(ray.actors)) == (2, 3)
        assert [len(actor.end.answers) for actor in ray.actors] == [1, 0, 1]

    asyncio.run(check())


def test_an_actor_that_is_out_of_reach_for_a_while_is_kept_and_an_agent_that_has_ended_is_started_again(ray):
    async def check() -> None:
        async with opened(ray, 1) as cluster:
            (actor,) = ray.actors
            actor.is_running.next = ActorUnavailableError("its link is cut")
            asked = len(actor.is_running.answers)
            await until(lambda: len(actor.is_running.answers) > asked + 2)
            assert (len(ray.actors), len(actor.start.answers)) == (1, 1)
            actor.is_running.next = False
            await until(lambda: len(actor.start.answers) == 2)
            assert cluster.addresses == ["a:1"]
            actor.start.answers[1].set_exception(RayError("no port is free"))
            await until(lambda: len(ray.actors) == 2)
            ray.actors[1].start.answers[0].set_result("b:1")
            await until(lambda: cluster.addresses == ["b:1"])
            # Its place is given up while another start is under way.
            ray.actors[1].is_running.next = False
            await until(lambda: len(ray.actors[1].start.answers) == 2)
        assert ray.actors[1].end.answers == []

    asyncio.run(check())


def test_an_agent_that_does_not_start_and_a_wait_that_is_too_long_end_by_name_with_nothing_left(ray):
    async def check() -> None:
        opening = asyncio.create_task(RayCluster(RayHosts(2), "token", 7100, 0).opened(60.0).__aenter__())
        await until(lambda: len(ray.actors) == 2)
        ray.actors[0].start.answers[0].set_result("a:1")
        await asyncio.sleep(0.02)
        ray.actors[1].start.answers[0].set_exception(RayError("the ports are taken"))
        with pytest.raises(NoRoomInCluster, match="an agent did not start .* the ports are taken"):
            await opening
        assert len(ray.actors[0].end.answers) == 1
        said = r"2 of 2 hosts have no agent .* group of \{'CPU': 1.0\}, and \{'CPU': 1.0\} of \{'CPU': 9.0\} are free"
        with pytest.raises(NoRoomInCluster, match=said):
            await RayCluster(RayHosts(2), "token", 7100, 0).opened(0.05).__aenter__()
        assert len(ray.groups) == 4

    asyncio.run(check())
