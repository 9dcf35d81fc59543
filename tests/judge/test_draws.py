"""Draws: reproducible by seed only, at shifting addresses, compared bit by bit; outputs that alias are found."""

import math

import pytest
import torch
import toy

from mkb_env.judge import draws, structure
from mkb_env.judge.eager import LAUNCH_US, MEMORY_BYTES_PER_US, SYNC_US, VIEW_US, eager_us
from mkb_env.plan import Buffer, TensorView
from mkb_env.problems.contract import load

CPU = torch.device("cpu")


def test_a_seed_gives_the_same_bits_at_another_address() -> None:
    problem = toy.problem()
    first, second = (draws.draw(problem, toy.SHAPE, 7, CPU) for _ in range(2))
    other = draws.draw(problem, toy.SHAPE, 8, CPU)
    assert not draws.changed(first, second, CPU).any()
    assert draws.changed(first, other, CPU).all()
    addresses = {draws.draw(problem, toy.SHAPE, 7, CPU)[0].data_ptr() for _ in range(20)}
    assert len(addresses) > 10
    assert all(address % draws.ALIGNMENT == 0 for address in addresses)


def test_changes_are_found_in_any_bit_and_any_type() -> None:
    values = (torch.tensor([math.nan, 0.0, 1.0]), torch.tensor([True, False]), 3, torch.zeros(0))
    same = tuple(v.clone() if isinstance(v, torch.Tensor) else v for v in values)
    assert draws.changed(values, same, CPU).tolist() == [False] * 4
    same[0][1] = -0.0
    same[1][1] = True
    assert draws.changed(values, same, CPU).tolist() == [True, True, False, False]


def test_seeds_differ_and_are_committed_to_by_a_hash() -> None:
    seeds = draws.new_seeds(100)
    assert len(set(seeds)) == 100
    assert draws.seeds_sha256(seeds) == draws.seeds_sha256(list(seeds)) != draws.seeds_sha256(seeds[::-1])


def test_strict_math_puts_the_settings_back() -> None:
    matmul = torch.backends.cuda.matmul
    before = matmul.allow_tf32, matmul.allow_bf16_reduced_precision_reduction
    with pytest.raises(KeyError), draws.strict_math():
        assert not matmul.allow_tf32 and not matmul.allow_bf16_reduced_precision_reduction
        raise KeyError
    assert (matmul.allow_tf32, matmul.allow_bf16_reduced_precision_reduction) == before


def test_the_anchor_must_be_float64() -> None:
    problem = toy.problem(reference=lambda x, bias: (2 * x + bias).float())
    inputs = draws.draw(problem, toy.SHAPE, 1, CPU)
    with pytest.raises(draws.ProblemError, match="not float64"):
        draws.anchors(problem, inputs, draws.expected(problem, toy.SHAPE, inputs))


def outputs(*views: TensorView) -> str:
    plan = toy.plan(buffers=(Buffer(1024, 0), Buffer(1024), Buffer(1024)), outputs=views, steps=())
    return structure.aliases(plan, CPU)


def test_outputs_that_share_bytes_are_found() -> None:
    assert "memory of input 0" in outputs(toy.view(0, (8,)))
    assert "share memory" in outputs(toy.view(1, (16,)), toy.view(1, (8,), offset=60))
    assert "share one address" in outputs(toy.view(1, (4, 8), strides=(0, 1)))
    assert "share one address" in outputs(toy.view(1, (4, 8), strides=(7, 1)))


def test_outputs_that_interleave_or_are_permuted_are_allowed() -> None:
    assert not outputs(toy.view(1, (4, 8), strides=(16, 1)), toy.view(1, (4, 8), offset=32, strides=(16, 1)))
    assert not outputs(toy.view(1, (16,)), toy.view(1, (8,), offset=64), toy.view(2, (16,)))
    assert not outputs(toy.view(1, (4, 8), strides=(1, 4)))
    assert not outputs(toy.view(1, (1, 8), strides=(0, 1)), toy.view(1, (0, 8)))


def test_the_eager_model_counts_launches_traffic_and_products() -> None:
    ones = torch.ones(1 << 22)
    add = toy.problem(reference=lambda x: x + x)
    assert eager_us(add, (torch.ones(4),)) == LAUNCH_US
    assert eager_us(add, (ones,)) == pytest.approx(2 * ones.nbytes / MEMORY_BYTES_PER_US)
    assert eager_us(toy.problem(reference=lambda x: x.view(2, 2).T), (torch.ones(4),)) == 2 * VIEW_US
    assert eager_us(toy.problem(reference=lambda x: torch.ones(1) * x.sum().item()), (ones[:4],)) > SYNC_US
    square = torch.ones(1024, 1024)
    assert eager_us(toy.problem(reference=torch.mm), (square, square)) == pytest.approx(2 * 1024**3 / 50e6)


def test_the_eager_model_is_near_the_measured_baseline() -> None:
    problem = load("fused_add_rmsnorm_h4096_llama31_8b_bf16")
    inputs = tuple(
        torch.empty(shape, dtype=torch.bfloat16, device="meta") for shape in ((14509, 4096),) * 2 + ((4096,),)
    )
    # Measured on an H200: 0.9 ms.
    assert 600 < eager_us(problem, inputs) < 1200
