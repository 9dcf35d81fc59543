"""Evaluation of hand-written PTX on the simulator: each way to end, and what is still known then."""

import re
from typing import Any

import msgspec
import pytest
import torch
import toy

from mkb_env.devices.simulator import SimulatorDevice
from mkb_env.judge.evaluate import EvaluateOptions, evaluate
from mkb_env.judge.verdict import MAX_MESSAGE, Evaluation, Stage
from mkb_env.plan import Buffer, Image, LaunchPlan, OutputTree


def judge(plan: LaunchPlan, problem: Any = None, device: SimulatorDevice | None = None, **options: Any) -> Evaluation:
    device = device or SimulatorDevice(time_limit=20, block_budget=20_000)
    return evaluate(problem or toy.problem(), toy.SHAPE, plan, device, EvaluateOptions(**options))


def test_a_correct_kernel_passes() -> None:
    steps: list[tuple[str, int, int]] = []
    result = evaluate(
        toy.problem(), toy.SHAPE, toy.plan(), SimulatorDevice(), progress=lambda *step: steps.append(step)
    )
    assert result.stage is Stage.PASSED
    assert steps == [("check", n, 5) for n in range(1, 6)]
    assert [kernel.name for kernel in result.kernels] == ["toy"]
    assert result.timing is not None and result.timing.simulated and result.timing.device_speedup is None
    speedup = result.timing.speedup
    assert speedup.low == speedup.value == speedup.high == result.timing.baseline_us / result.timing.kernel_us
    assert {"load", "draw", "check", "reference", "timing"} <= set(result.seconds)
    [diff] = result.diffs
    assert diff.passed and diff.share_outside == 0 and diff.max_abs_error <= diff.allowance
    assert msgspec.json.decode(msgspec.json.encode(result), type=Evaluation) == result


def test_seeds_are_new_each_time_and_not_told() -> None:
    hashes = {judge(toy.plan(), timing=False).seeds_sha256 for _ in range(2)}
    assert len(hashes) == 2
    assert all(re.fullmatch("[0-9a-f]{64}", value) for value in hashes)


def test_expected_values_do_not_exist_while_the_candidate_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    device, log = SimulatorDevice(), []
    bound = type(device.load(toy.plan()).bind(toy.make_inputs(torch.Generator(), toy.SHAPE)))
    monkeypatch.setattr(bound, "run", toy.logged(bound.run, log, "run"))
    problem = toy.problem(reference=toy.logged(toy.reference, log, "reference"))
    assert judge(toy.plan(), problem, device, correctness_draws=2, timing=False).stage is Stage.PASSED
    assert log == ["run", "reference", "reference", "run", "run", "reference", "reference"]


@pytest.mark.parametrize(
    ("body", "stage", "words"),
    [
        ("scaled", Stage.INCORRECT, ["constant factor", "0.5 times", "output[0] (`y`, 6x64 float32)"]),
        ("no tail", Stage.INCORRECT, ["not written", "the last 2 rows"]),
        ("writes input", Stage.INCORRECT, ["`bias`", "read-only"]),
        ("out of bounds", Stage.LAUNCH_ERROR, ["correctness draw 1 of 5"]),
        ("past the input", Stage.LAUNCH_ERROR, ["it starts right at the end of input 1 (bias) of 256 bytes"]),
        ("before the output", Stage.LAUNCH_ERROR, ["it starts 4 bytes before output 0 (y) of 1536 bytes"]),
        ("endless", Stage.TIMEOUT, ["correctness draw 1 of 5"]),
    ],
)
def test_each_fault_has_its_stage_and_words(body: str, stage: Stage, words: list[str]) -> None:
    result = judge(toy.plan(toy.BODIES[body]))
    assert result.stage is stage, result.message
    assert all(word in result.message for word in words), result.message
    assert len(result.message) <= MAX_MESSAGE
    assert result.timing is None
    assert [kernel.name for kernel in result.kernels] == ["toy"]


def test_a_workspace_and_a_long_kernel_name_are_told_plainly() -> None:
    name = "toy" + "_and_more" * 20
    plan = toy.plan(toy.BODIES["past the input"])
    launch = plan.launches[0]
    spare = msgspec.structs.replace(launch, kernel=name, params=(launch.params[0], toy.pointer(3), launch.params[2]))
    image = Image(plan.images[0].ptx.replace(".entry toy(", f".entry {name}("), b"")
    result = judge(toy.plan(buffers=(*plan.buffers, Buffer(256)), images=(image,), steps=(spare,)))
    assert result.stage is Stage.LAUNCH_ERROR
    assert "it starts right at the end of a workspace of 256 bytes" in result.message
    assert f"of {name[:60]}...: ld.global" in result.message and name not in result.message


def test_an_unknown_instruction_costs_the_agent_nothing() -> None:
    result = judge(toy.plan("wmma.nonsense.f32 %f4, %f1;"))
    assert result.stage is Stage.UNSUPPORTED and not result.stage.costs_step


def test_one_wrong_output_of_two_is_told_apart() -> None:
    problem = toy.problem(
        outputs=("y", "z"),
        output_specs=lambda shape: ((((shape["rows"], toy.WIDTH)), torch.float32),) * 2,
        reference=lambda x, bias: (2 * x + bias, x.clone()),
    )
    pair = OutputTree("tuple", (OutputTree("tensor"),) * 2)
    rows = toy.SHAPE["rows"]
    plan = toy.plan(
        buffers=(*toy.plan().buffers, Buffer(4 * rows * toy.WIDTH)),
        outputs=(toy.view(2, (rows, toy.WIDTH)), toy.view(3, (rows, toy.WIDTH))),
        output_tree=pair,
    )
    result = judge(plan, problem)
    assert result.stage is Stage.INCORRECT
    assert [diff.passed for diff in result.diffs] == [True, False]
    assert (
        "nothing was written" in result.diffs[1].pattern and "output[0] (`y`, 6x64 float32) is right" in result.message
    )


def test_an_output_in_an_inputs_memory_is_refused() -> None:
    result = judge(toy.plan(outputs=(toy.view(0, (6, toy.WIDTH)),)))
    assert result.stage is Stage.INCORRECT and "memory of input 0" in result.message
    assert not result.kernels


def test_outputs_of_another_shape_or_structure_are_refused() -> None:
    flat = judge(toy.plan(outputs=(toy.view(2, (6 * toy.WIDTH,)),)))
    assert flat.stage is Stage.INCORRECT and "(384,)" in flat.message and "(6, 64)" in flat.message
    listed = judge(toy.plan(output_tree=OutputTree("tuple", (OutputTree("tensor"),))))
    assert listed.stage is Stage.INCORRECT and "a tuple of 1 items" in listed.message


def test_a_plan_for_other_inputs_is_refused() -> None:
    buffers = (Buffer(4 * 7 * toy.WIDTH, 0), *toy.plan().buffers[1:])
    result = judge(toy.plan(buffers=buffers))
    assert result.stage is Stage.LAUNCH_ERROR and "another workload" in result.message and "`x`" in result.message


def test_a_kernel_that_turns_wrong_later_is_found() -> None:
    result = judge(toy.plan(toy.DRIFT.format(calls=3)))
    assert result.stage is Stage.INCORRECT, result.message


def test_a_problem_that_breaks_its_contract_is_not_the_agents_fault() -> None:
    for broken in (
        toy.problem(reference=lambda x, bias: (2 * x + bias).bfloat16()),
        toy.problem(reference=lambda x, bias: (2 * x + bias).float()),
        toy.problem(make_inputs=lambda generator, shape: toy.make_inputs(generator, shape)[:1]),
    ):
        result = judge(toy.plan(), broken)
        assert result.stage is Stage.INFRA_ERROR and "toy" in result.message, result.message


def test_inputs_that_differ_by_themselves_are_not_blamed_on_the_kernel() -> None:
    counter = iter(range(1, 1000))
    result = judge(toy.plan(), toy.problem(make_inputs=lambda _, s: toy.make_inputs(_seeded(next(counter)), s)))
    assert result.stage is Stage.INFRA_ERROR and "different inputs for the same seed" in result.message


def _seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_a_plan_that_answers_otherwise_the_second_time_is_caught() -> None:
    result = judge(toy.plan(toy.DRIFT.format(calls=5)), correctness_draws=5, timing=False)
    assert result.stage is Stage.INCORRECT
    assert "second run on the same inputs" in result.message and "a race" in result.message
    assert judge(toy.plan(toy.DRIFT.format(calls=6)), correctness_draws=5, timing=False).stage is Stage.PASSED
