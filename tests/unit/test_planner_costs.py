"""The sources of the planner's costs: runs, traces, data sheets. And results of it that must not be believed."""

import dataclasses

import numpy as np
import pytest

from megatron_rl.analysis.plan.calibrate import MeasuredRun, RunLayout, calibrate, fit
from megatron_rl.analysis.plan.chips import ASSUMED, CHIPS, find_figures
from megatron_rl.analysis.plan.costs import BatchingCosts, Costs, DraftCosts, ScriptedCosts, Setting, TrainerCosts
from megatron_rl.analysis.plan.doubts import NO_RUN, describe_errors, find_doubts, leave_one_out
from megatron_rl.analysis.plan.engines import SimulatedGroup
from megatron_rl.analysis.plan.figures import DeviceSplit, TrainedAdapters, estimate
from megatron_rl.analysis.plan.lengths import Uniform
from megatron_rl.analysis.plan.memory import count_running, count_trainer_bytes
from megatron_rl.analysis.plan.pipeline import count_slot, slot_seconds
from megatron_rl.analysis.plan.records import read_record, read_trace_record
from megatron_rl.analysis.plan.simulate import _Run
from megatron_rl.config.rank_bytes import Micro, count_parameters
from megatron_rl.errors import ForeignVersion, InputError, UsageError
from megatron_rl.types import Experts
from tests.unit.test_examples import QWEN3_4B

TRAINER = TrainerCosts(per_token=4e-4, per_micro_batch=0.03, per_pair=2e-7, update=0.5)
BATCHING = BatchingCosts(0.02, 2e-3, max_running=12, max_in_flight=24)
SCRIPTED = ScriptedCosts(900.0, (0.5, 1.5), max_in_flight=16)
SETTING = Setting(
    "periodic", 24, 4, 4, Uniform(30, 30), Uniform(20, 200), num_engines=2, num_replicas=1, trainer_devices=1,
    engine_devices=2,
)  # fmt: skip


class Recorded(_Run):
    """A writer of a simulated run, in the form of a real one."""

    def __init__(self, setting, costs):
        super().__init__(setting, costs, 3)
        self.audit, self.metrics = [], []
        self._claims = []

    def iterate(self, version):
        self._claims = []
        one = self.iterate_apart(version)
        plan = {
            "num_prompts": self._setting.num_prompts, "group_size": self._setting.group_size, "order": "completion",
            "micro_batch_size": self._setting.micro_batch_size, "num_replicas": self._setting.num_replicas,
            "num_updates": self._setting.num_updates,
        }  # fmt: skip
        self.audit.append(
            {"event": "submit", "version": version, "time": one.start + one.trainer["publish"], "plan": plan}
        )
        groups = sorted({id(group): group for group, _ in self._claims}.values(), key=lambda group: group.finished)
        for group in groups:
            responses = [{"num_tokens": length, "engine": self.engine_of[id(group)]} for length in group.lengths]
            self.audit.append(
                {
                    "event": "group",
                    "version": version,
                    "time": group.finished,
                    "prompt": group.index,
                    "responses": responses,
                }
            )
        for number, (group, claimed) in enumerate(self._claims):
            self.audit.append(
                {"event": "claim", "version": version, "time": claimed, "replica": 0, "index": number,
                 "prompts": [group.index]}
            )  # fmt: skip
        self.audit.append({"event": "complete", "version": version, "time": one.end})
        parts = one.trainer
        time = {
            "iteration": one.seconds,
            "publish": parts["publish"],
            "train": parts["busy"],
            "update": parts["update"],
        }
        tokens = {"prompt": sum(group.prompt for group in groups)}
        self.metrics.append({"version": version, "groups": len(groups), "tokens": tokens, "time": time})

    def _give(self, pipeline, groups, arrival):
        (group,) = groups
        self._claims.append((group, arrival))
        super()._give(pipeline, groups, arrival)


@pytest.fixture
def recorded(monkeypatch):
    """Make a run of these costs, as its files say it."""
    engine_of = {}

    def make(setting, costs, name="run", count=4, **layout):
        run = Recorded(setting, costs)
        run.engine_of = engine_of
        for number, engine in enumerate(run._engines):
            begin = engine.begin

            def noted(group: SimulatedGroup, now: float, begin=begin, number=number):
                engine_of[id(group)] = f"engine-{number}"
                begin(group, now)

            monkeypatch.setattr(engine, "begin", noted)
        for version in range(count):
            run.iterate(version)
        return MeasuredRun(read_record(name, run.metrics, run.audit), RunLayout(**layout))

    return make


def test_the_costs_of_a_batching_engine_and_of_the_trainer_are_found_in_a_run(recorded):
    # Engines that are ahead of the trainer: only a rank that need not wait shows the time of a micro-batch.
    run = recorded(SETTING, Costs(BATCHING.faster(10), TRAINER, publish=2.0), max_running=12, max_in_flight=24)
    found = calibrate([run])
    assert found.engine.step == pytest.approx(0.002, rel=0.01)
    assert found.engine.per_sequence == pytest.approx(2e-4, rel=0.01)
    assert (found.publish, found.trainer.update) == (pytest.approx(2.0), pytest.approx(0.5))
    for length in (50, 110, 180):
        counted = count_slot([(30, [length] * 4)], is_shared=True)
        assert slot_seconds(found.trainer, *counted) == pytest.approx(slot_seconds(TRAINER, *counted), rel=0.03)


def test_the_costs_of_a_scripted_engine_are_found_in_a_run(recorded):
    run = recorded(SETTING, Costs(SCRIPTED, TRAINER), count=17, engine="scripted", max_in_flight=16)
    found = calibrate([run]).engine
    assert found.tokens_per_second == pytest.approx(900, rel=0.1)
    assert found.delay == (pytest.approx(0.5, abs=0.25), pytest.approx(1.5, abs=0.25))


def test_a_run_in_which_the_parts_of_a_micro_batch_cannot_be_told_apart_has_a_cost_of_a_token(recorded):
    setting = dataclasses.replace(SETTING, responses=Uniform(100, 105))
    found = calibrate([recorded(setting, Costs(BATCHING, TRAINER), max_running=12, max_in_flight=24)]).trainer
    assert found.per_micro_batch == found.per_pair == 0
    tokens, pairs = count_slot([(30, [102] * 4)], is_shared=True)
    assert slot_seconds(found, tokens, pairs) == pytest.approx(slot_seconds(TRAINER, tokens, pairs), rel=0.02)


def test_the_last_stage_has_the_output_layer_besides_its_layers(recorded):
    run = recorded(SETTING, Costs(BATCHING, TRAINER), max_running=12, max_in_flight=24)
    even, uneven = (
        calibrate([dataclasses.replace(run, layout=dataclasses.replace(run.layout, num_stages=2, output_share=share))])
        for share in (0.0, 0.2)
    )
    assert uneven.trainer.output_share == 0.2
    # Both stages took as long as the slower one, which computes 0.4 + 0.2 of a micro-batch.
    assert uneven.trainer.per_token / even.trainer.per_token == pytest.approx(0.5 / 0.6)


def test_runs_of_different_kinds_of_engines_are_refused(recorded):
    one = recorded(SETTING, Costs(SCRIPTED, TRAINER), engine="scripted", max_in_flight=16)
    other = recorded(SETTING, Costs(BATCHING, TRAINER), max_running=12, max_in_flight=24)
    with pytest.raises(InputError, match="cannot be mixed: name runs of one kind"):
        calibrate([one, other])


def test_a_run_without_a_whole_iteration_is_refused():
    with pytest.raises(InputError, match="no whole iteration after the first 1"):
        read_record("short", [], [])


def test_fitted_factors_are_not_negative_and_outliers_do_not_bend_them():
    draw = np.random.default_rng(0)
    rows = draw.uniform(0, 10, (60, 3))
    values = rows @ [2.0, 0.0, 0.5]
    values[7] += 400
    assert fit(rows.tolist(), values.tolist()) == pytest.approx([2.0, 0.0, 0.5], abs=1e-6)
    assert min(fit(rows.tolist(), (rows @ [1.0, -3.0, 1.0]).tolist())) >= 0


def test_costs_that_noise_does_not_tell_apart_go_to_the_first_columns():
    draw = np.random.default_rng(1)
    first = draw.uniform(1, 10, 200)
    # All grow together, like steps, responses, context and prompts of an engine that is always full.
    rows = np.stack([first, *(first * draw.normal(1, 0.02, 200) for _ in range(3))], axis=1)
    found = fit(rows.tolist(), (rows @ [2.0, 1.0, 0.0, 0.0] + draw.normal(0, 1.0, 200)).tolist())
    assert found[2] == found[3] == 0
    assert found[0] + found[1] == pytest.approx(3.0, rel=0.05)


def trace_line(process, stage, spans, **facts):
    kinds = [
        {"lane": "compute", "name": "forward", "role": "policy"},
        {"lane": "compute", "name": "backward", "role": "policy"},
        {"lane": "compute", "name": "forward", "role": "reference"},
        {"lane": "main", "name": "wait"},
    ]
    return {
        "version": 1, "format": 1, "process": process, "replica": 0, "stage": stage, "kinds": kinds, "spans": spans,
        **facts,
    }  # fmt: skip


def test_a_trace_says_what_micro_batches_took_over_stages_of_the_policy_alone():
    lines = [
        trace_line("rank-0", 0, [[0, 0, 1000, 0, 500], [2, 0, 9000, 0, 500], [1, 10, 3000, 0, 500], [3, 5, 70, 0]]),
        # Two ranks of a stage compute the same micro-batch at the same time.
        trace_line("rank-1", 1, [[0, 0, 2000, 0, 500], [1, 10, 5000, 0, 500], [0, 0, 2000, 1, 400]]),
        trace_line("rank-2", 1, [[0, 0, 2000, 0, 500], [1, 10, 7000, 0, 500]]),
        {**trace_line("sidecar", None, []), "engines": {"engine-0": 32, "engine-1": 16}},
    ]
    trace = read_trace_record(lines)
    (one,) = trace.micro_batches
    assert (trace.num_stages, trace.max_running) == (2, 32)
    assert (one.version, one.replica, one.slot, one.tokens) == (1, 0, 0, 500)
    assert (one.forward, one.backward) == (pytest.approx(0.003), pytest.approx(0.009))
    assert read_trace_record([]) is None
    with pytest.raises(ForeignVersion, match=r"the trace was written by another version .* plan with that version"):
        read_trace_record([{**lines[0], "format": 2}])


def test_a_trace_tells_the_shape_even_of_a_run_that_always_waits(recorded):
    costs = Costs(BatchingCosts(0.5, max_running=12, max_in_flight=24), TRAINER)
    run = recorded(SETTING, costs, max_running=12, max_in_flight=24)
    spans, versions = {}, {one.version: one for one in run.record.iterations}
    for version, iteration in versions.items():
        lengths = {group.index: group.lengths for group in iteration.groups}
        spans[version] = []
        for claim in iteration.claims:
            tokens, pairs = count_slot([(30, lengths[claim.groups[0]])], is_shared=True)
            micros = 1e6 * slot_seconds(TRAINER, tokens, pairs)
            spans[version] += [[0, 0, 0.25 * micros, claim.index, tokens], [1, 0, 0.75 * micros, claim.index, tokens]]
    lines = [{**trace_line("rank-0", 0, of_version), "version": version} for version, of_version in spans.items()]
    found = calibrate([dataclasses.replace(run, trace=read_trace_record(lines))]).trainer
    assert found.per_micro_batch == pytest.approx(0.03, rel=0.02)
    assert found.per_token == pytest.approx(4e-4, rel=0.02)
    assert found.backward_share == pytest.approx(0.75)
    assert calibrate([run]).trainer.per_micro_batch == 0


def test_each_run_is_predicted_from_all_others(recorded):
    layout = {"max_running": 12, "max_in_flight": 24}
    costs = Costs(BATCHING, TRAINER, publish=2.0)
    runs = [
        recorded(SETTING, costs, "first", 6, **layout),
        recorded(dataclasses.replace(SETTING, num_prompts=32), costs, "second", 6, **layout),
        recorded(SETTING, dataclasses.replace(costs, publish=30.0), "odd", 6, **layout),
    ]
    first, second, odd = leave_one_out(runs)
    assert (first.name, second.name, odd.name) == ("first", "second", "odd")
    # The third had a slow publish, which the two others cannot know.
    assert odd.error < -0.4
    assert leave_one_out(runs[:1]) == []
    (alike, other) = leave_one_out(runs[:2])
    assert abs(alike.error) < 0.05
    assert abs(other.error) < 0.05
    text = "\n".join(describe_errors([first, second, odd]))
    assert "odd" in text
    assert f"{abs(odd.error):.1%} worst" in text


def test_settings_that_runs_do_not_cover_are_named_and_covered_ones_are_not(recorded):
    run = recorded(SETTING, Costs(BATCHING, TRAINER), max_running=12, max_in_flight=24)
    other = dataclasses.replace(run, record=dataclasses.replace(run.record, num_prompts=48))
    assert list(find_doubts(run.setting, [])) == [NO_RUN]
    assert list(find_doubts(run.setting, [run, other])) == []
    narrow = dataclasses.replace(calibrate([run]).engine, max_running=4)
    assert "all runs sampled up to 12 responses at once, so they do not show how long 4 take" in "\n".join(
        find_doubts(run.setting, [run], narrow)
    )
    assert not any("at once" in doubt for doubt in find_doubts(run.setting, [run], calibrate([run]).engine))
    far = dataclasses.replace(
        run.setting, num_prompts=480, responses=Uniform(2000, 2000), num_stages=4, trainer_devices=64, schedule="sync"
    )
    doubts = "\n".join(find_doubts(far, [run]))
    for words in (
        "1920 responses an iteration, and the runs cover 96",
        "2000 tokens of a response, and the runs cover",
        "66 devices, and the runs cover 3",
        "no run had 4 pipeline stages",
        "no run had the schedule sync",
        "one run cannot show the error of a prediction",
    ):
        assert words in doubts


def test_an_unknown_chip_is_refused_with_those_that_are_known():
    with pytest.raises(UsageError, match="write one of a100, h100, h200"):
        find_figures("b300")


def test_parameters_are_counted_as_models_have_them():
    # 4.02 B of Qwen3-4B, whose embedding is its output layer; norms are left out.
    assert count_parameters(QWEN3_4B).total == pytest.approx(4.02e9, rel=0.002)
    sparse = dataclasses.replace(
        QWEN3_4B, num_layers=48, hidden_size=2048, num_query_groups=4, tied_embeddings=False,
        experts=Experts(num_experts=128, num_active=8, ffn_hidden_size=768),
    )  # fmt: skip
    # Qwen3-30B-A3B.
    assert count_parameters(sparse).total == pytest.approx(30.5e9, rel=0.01)
    assert count_parameters(sparse).active == pytest.approx(3.0e9, rel=0.05)


def test_a_faster_chip_and_more_devices_cost_less_time():
    split = DeviceSplit(tensor=2, replicas=2, num_engines=2, engine_tensor=2)
    slow, fast = (estimate(QWEN3_4B, CHIPS[name], split, 64) for name in ("a100", "h100"))
    assert fast.trainer.per_token < slow.trainer.per_token
    assert fast.engine.step < slow.engine.step
    wide = estimate(QWEN3_4B, CHIPS["h100"], dataclasses.replace(split, tensor=4, engine_tensor=4), 64)
    assert wide.trainer.per_token < fast.trainer.per_token
    # Twice the devices are less than twice as fast: they talk to each other.
    assert wide.trainer.per_token > fast.trainer.per_token / 2
    assert wide.engine.step < fast.engine.step
    recomputed = estimate(QWEN3_4B, CHIPS["h100"], split, 64, recomputes=True)
    assert recomputed.trainer.per_token > 1.2 * fast.trainer.per_token


def test_adapters_cost_less_than_weights_and_alone_they_take_slots():
    split, chip = DeviceSplit(tensor=2, replicas=2, num_engines=2), CHIPS["h100"]
    whole = estimate(QWEN3_4B, chip, split, 64)
    merged, alone = (TrainedAdapters.of(QWEN3_4B, 32, is_alone) for is_alone in (False, True))
    # 36 layers; each module has rank x (outputs + inputs).
    sizes = {"q": (4096, 2560), "k": (1024, 2560), "v": (1024, 2560), "o": (2560, 4096)}
    sizes |= {"gate": (9728, 2560), "up": (9728, 2560), "down": (2560, 9728)}
    assert alone.num_parameters == 36 * 32 * sum(map(sum, sizes.values()))
    of_merged, of_alone = (estimate(QWEN3_4B, chip, split, 64, adapters=one) for one in (merged, alone))
    assert of_merged.publish == whole.publish
    moved = [one.publish - ASSUMED.publish_seconds for one in (of_alone, whole)]
    assert moved[0] / moved[1] == pytest.approx(alone.num_parameters / count_parameters(QWEN3_4B).total)
    assert of_merged.engine == whole.engine
    assert whole.engine.step < of_alone.engine.step < 1.05 * whole.engine.step
    assert 0.66 < of_alone.trainer.per_token / whole.trainer.per_token < 0.75
    assert of_alone.trainer.update < 0.03 * whole.trainer.update
    micro = Micro(4096, 8)
    trained, of_adapters = (count_trainer_bytes(QWEN3_4B, split, micro, 1, adapters=one) for one in (None, alone))
    # The reference's weights, and nearly all gradients and states: 2 + 4 + 12 / 2 bytes of half of the parameters.
    saved = (trained - of_adapters) / (count_parameters(QWEN3_4B).total / 2)
    assert saved == pytest.approx(12, rel=0.03)
    running = [count_running(QWEN3_4B, 1, 1000, 80, one) for one in (None, merged, alone)]
    assert running[0] == running[1] > running[2] > 0.98 * running[0]


def test_a_publish_takes_longer_with_more_hosts_of_engines_than_the_trainers_links_carry_at_once():
    def publish(trainer_hosts: int, engine_hosts: int) -> float:
        split = DeviceSplit(tensor=8, replicas=trainer_hosts, num_engines=engine_hosts, engine_tensor=8)
        return estimate(QWEN3_4B, CHIPS["h100"], split, 64).publish - ASSUMED.publish_seconds

    once = count_parameters(QWEN3_4B).total * 2 / (CHIPS["h100"].network * ASSUMED.network)
    cases = ((1, 1, 1), (2, 1, 1), (1, 4, 4), (4, 4, 1), (2, 8, 4), (1, 16, 2), (2, 16, 1))
    for trainer_hosts, engine_hosts, times in cases:
        assert publish(trainer_hosts, engine_hosts) == pytest.approx(times * once), (trainer_hosts, engine_hosts)


def test_an_engine_holds_fewer_responses_the_longer_they_are_and_none_of_a_model_that_is_too_large():
    short, long = (count_running(QWEN3_4B, 1, context, 80) for context in (1000, 4000))
    assert short == pytest.approx(4 * long, rel=0.01)
    assert count_running(dataclasses.replace(QWEN3_4B, num_layers=1000), 1, 1000, 80) == 0


@pytest.mark.parametrize(("acceptance", "num_tokens"), [(0.0, 4), (0.6, 1), (0.8, 5), (1.0, 3)])
def test_a_step_with_drafts_gives_the_tokens_before_the_first_one_that_is_refused_and_one_more(acceptance, num_tokens):
    refused_at = [acceptance**place * (1 - acceptance) for place in range(num_tokens)]
    expected = sum((place + 1) * share for place, share in enumerate([*refused_at, acceptance**num_tokens]))
    drafts = DraftCosts(acceptance, num_tokens, cost=0.25)
    assert drafts.accepted_length == pytest.approx(expected, rel=1e-12)
    engine = BatchingCosts(0.02, 2e-3, 1e-6, 1e-5, 3e-3)
    found = engine.drafting(drafts)
    # A step with 7 responses of 100 tokens of context each, which compute with all tokens of their drafts.
    step = 0.02 * (1 + 0.25 * num_tokens) + 7 * (num_tokens + 1) * 2e-3 + 700 * 1e-6
    per_token = found.step + 7 * found.per_sequence + 700 * found.per_context
    assert per_token * expected == pytest.approx(step, rel=1e-12)
    assert (found.per_prompt_token, found.per_prompt) == (engine.per_prompt_token, engine.per_prompt)
