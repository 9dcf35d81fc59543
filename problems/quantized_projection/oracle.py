"""What the checks of this family share: formats by exhaustive tables, and other orders of the products.

The tables are written from the formats' definitions, the quantisers search them for the nearest number in float64;
neither uses torch's float8 types or ``common``, except where :func:`check_fp8` and :func:`check_fp4` test the latter.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from mkb_env.problems.quantized_projection import common

Quantizer = Callable[[torch.Tensor], torch.Tensor]
Linear = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def e4m3_table(device: torch.device) -> torch.Tensor:
    """The numbers of all 256 codes, float64: sign, four exponent bits with bias 7, three mantissa bits."""
    values = []
    for code in range(256):
        sign, exponent, mantissa = 1 - 2 * (code >> 7), code >> 3 & 15, code & 7
        number = mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)
        values.append(float("nan") if code & 127 == 127 else sign * number)
    return torch.tensor(values, dtype=torch.float64, device=device)


def e2m1_table(device: torch.device) -> torch.Tensor:
    """The numbers of all 16 codes, float64: sign, two exponent bits with bias 1, one mantissa bit."""
    values = []
    for code in range(16):
        sign, exponent, mantissa = 1 - 2 * (code >> 3), code >> 1 & 3, code & 1
        values.append(sign * (mantissa / 2 if exponent == 0 else (1 + mantissa / 2) * 2.0 ** (exponent - 1)))
    return torch.tensor(values, dtype=torch.float64, device=device)


def nearest(values: torch.Tensor, grid: torch.Tensor) -> torch.Tensor:
    """The number of ``grid`` (of codes 0, 1, ...; ascending) nearest to |values|, ties to the even code, signed."""
    distance = (values.abs().clamp_max(grid[-1]).unsqueeze(-1) - grid).abs()
    tied = distance == distance.amin(dim=-1, keepdim=True)
    even = torch.arange(len(grid), device=grid.device) % 2 == 0
    return grid[(tied * (1 + even.int())).argmax(dim=-1)].copysign(values)


def nearest_e4m3(values: torch.Tensor) -> torch.Tensor:
    return nearest(values, e4m3_table(values.device)[:127])


def nearest_e2m1(values: torch.Tensor) -> torch.Tensor:
    return nearest(values, e2m1_table(values.device)[:8])


def quotient(numerator: torch.Tensor, denominator: torch.Tensor) -> torch.Tensor:
    """The float32 quotient of float32 numbers: that of float64, rounded (2 x 24 + 2 bits suffice for that)."""
    return (numerator.double() / denominator.double()).float().double()


def fp8_rows(x: torch.Tensor) -> torch.Tensor:
    """What bfloat16 rows stand for once quantised to e4m3 by blocks of 128, float64."""
    parts = []
    for block in x.double().split(128, dim=-1):
        largest = block.abs().amax(dim=-1, keepdim=True).clamp_min(torch.tensor(1e-10).item())
        scale = quotient(largest, torch.full_like(largest, 448))
        parts.append(nearest_e4m3(quotient(block, scale)) * scale)
    return torch.cat(parts, dim=-1)


def fp8_weight(codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """What a weight's codes with 128 x 128 scales stand for, float64."""
    block = torch.ones(128, 128, dtype=torch.float64, device=codes.device)
    rows, columns = codes.shape
    values = e4m3_table(codes.device)[codes.view(torch.uint8).int()]
    return values * torch.kron(scale.double(), block)[:rows, :columns]


def fp4(packed: torch.Tensor, scale: torch.Tensor, gscale: torch.Tensor) -> torch.Tensor:
    """What an NVFP4 tensor stands for, float64."""
    codes = torch.empty(*packed.shape[:-1], 2 * packed.shape[-1], dtype=torch.float64, device=packed.device)
    table = e2m1_table(packed.device)
    codes[..., 0::2] = table[packed.remainder(16).int()]
    codes[..., 1::2] = table[packed.div(16, rounding_mode="floor").int()]
    scales = e4m3_table(packed.device)[scale.view(torch.uint8).int()]
    return codes * scales.repeat_interleave(16, dim=-1) * gscale.double()


def fp4_rows(x: torch.Tensor, gscale: torch.Tensor) -> torch.Tensor:
    """What bfloat16 rows stand for once quantised to NVFP4 with this factor, float64."""
    blocks, factor = x.double().unflatten(-1, (-1, 16)), gscale.double()
    largest = blocks.abs().amax(dim=-1, keepdim=True)
    scale = nearest_e4m3(quotient(largest, (6 * factor).float()))
    step = (scale * factor).float().double()
    codes = nearest_e2m1(quotient(blocks, torch.where(step > 0, step, 1.0)))
    return torch.where(step > 0, codes * scale * factor, 0.0).flatten(-2)


def sample(count: int, most: int, device: torch.device) -> torch.Tensor:
    """At most this many of ``count`` indices, at random, ascending."""
    return torch.randperm(count, device=device)[:most].sort().values


def check_fp8(device: torch.device) -> None:
    """``common``'s e4m3 numbers and quantiser against the tables: every code, every tie, and both sides of it."""
    table = e4m3_table(device)
    codes = torch.arange(256, device=device).to(torch.uint8).view(torch.float8_e4m3fn)
    torch.testing.assert_close(codes.double(), table, rtol=0, atol=0, equal_nan=True)
    grid = table[:127].float()
    ties = (grid[1:] + grid[:-1]) / 2
    probes = torch.cat([grid, ties, ties.nextafter(ties * 2), ties.nextafter(ties * 0), grid.new_tensor([449, 3e38])])
    probes = torch.cat([probes, -probes])
    assert torch.equal(common.fp8_round(probes).double(), nearest_e4m3(probes.double()))
    # A block with 448 in it has scale 1, so ties stay ties.
    blocks = torch.full((len(probes[:508]), 128), 448.0, device=device)
    blocks[:, :127] = probes[:508].clamp_max(448).unsqueeze(1)
    codes, scale = common.fp8_quantize(blocks)
    assert (scale == 1).all()
    assert torch.equal(codes.double(), nearest_e4m3(blocks.double()))


def check_fp4(device: torch.device) -> None:
    """``common``'s NVFP4 numbers and quantiser against the tables: every byte at every scale, every tie."""
    one = torch.ones(1, device=device)
    bytes_ = torch.arange(256, device=device).to(torch.uint8)
    scales = e4m3_table(device)[:127].to(torch.float8_e4m3fn)
    packed = bytes_.repeat_interleave(8).expand(127, -1).contiguous()
    scale = scales.unsqueeze(1).expand(-1, 256).contiguous()
    values = common.fp4_values(packed, scale, torch.float32)
    torch.testing.assert_close(values.double(), fp4(packed, scale, one), rtol=0, atol=0)
    assert torch.equal(values.bfloat16().float(), values), "a code times a scale is not exact in bfloat16"
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], device=device)
    probes = torch.cat([ties, ties.nextafter(ties * 2), ties.nextafter(ties * 0), e2m1_table(device)[:8].float()])
    blocks = torch.cat([probes, -probes]).unsqueeze(1).repeat(1, 16)
    blocks[:, 15] = 6.0
    for factor in (one, 2 * one, one / 2688):
        got = common.fp4_values(*common.fp4_quantize(blocks * factor, factor), torch.float64) * factor.double()
        torch.testing.assert_close(got, fp4_rows(blocks * factor, factor), rtol=0, atol=0)
    saturated = common.fp4_quantize(torch.full((1, 16), 1e9, device=device), one)
    assert (common.fp4_values(*saturated, torch.float32) == 448 * 6).all()
    zero = common.fp4_quantize(torch.zeros(1, 16, device=device), one)
    assert not zero[0].any() and not zero[1].float().any()


def fp8_blockwise(x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """The product as a kernel orders it: code products summed over 128, then both scales, then added in float32."""
    codes, x_scale = common.fp8_quantize(x)
    total = torch.zeros(len(x), len(weight), device=x.device)
    rows = scale.repeat_interleave(128, dim=0)[: len(weight)]
    for block, (a, b) in enumerate(zip(codes.float().split(128, 1), weight.float().split(128, 1), strict=True)):
        total += (a @ b.T) * x_scale[:, block : block + 1] * rows[:, block]
    return total


def fp8_linear_of(quantizer: Quantizer) -> Linear:
    """``common.fp8_linear`` with another quantiser: a function from rows to what they stand for then."""
    return lambda x, weight, scale: quantizer(x) @ common.fp8_weight(weight, scale, torch.float32).T


def per_token(x: torch.Tensor) -> torch.Tensor:
    """A fault: one FP8 scale for a whole row."""
    scale = x.float().abs().amax(dim=-1, keepdim=True).clamp_min(1e-10) / 448
    return common.fp8_round(x.float() / scale).float() * scale


def no_floor(x: torch.Tensor) -> torch.Tensor:
    """A fault: the FP8 scale of a block of zeros is 0."""
    blocks = x.float().unflatten(-1, (-1, 128))
    scale = blocks.abs().amax(dim=-1, keepdim=True) / 448
    return (common.fp8_round(blocks / scale).float() * scale).flatten(-2)


def floored(x: torch.Tensor, floor: float) -> torch.Tensor:
    """A fault: another floor under the largest element of a block."""
    blocks = x.float().unflatten(-1, (-1, 128))
    scale = blocks.abs().amax(dim=-1, keepdim=True).clamp_min(floor) / 448
    return (common.fp8_round(blocks / scale).float() * scale).flatten(-2)


def transposed_scales(x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """A fault: the weight's scales are read column by column."""
    return common.fp8_linear(x, weight, scale.flatten().view(scale.shape[::-1]).T.contiguous())


FP8_FAULTS: dict[str, Linear] = {
    "one activation scale for a whole token": fp8_linear_of(per_token),
    "activations not quantised": fp8_linear_of(lambda x: x.float()),
    "weight scales read column by column": transposed_scales,
}
"""Other products that no problem may accept."""


def swiglu(g: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
    return g / (1 + torch.exp(-g)) * u


def qwen3_mlp(x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """What transformers' Qwen3MLP passes to its down projection, float64."""
    from transformers import Qwen3Config
    from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP

    with torch.device("meta"):
        mlp = Qwen3MLP(Qwen3Config(hidden_size=gate.shape[1], intermediate_size=len(gate), hidden_act="silu"))
    mlp.gate_proj.weight, mlp.up_proj.weight = torch.nn.Parameter(gate), torch.nn.Parameter(up)
    mlp.set_submodule("down_proj", torch.nn.Identity())
    with torch.no_grad():
        return mlp(x)


def fp4_linear_rounded(
    x: torch.Tensor, packed: torch.Tensor, scale: torch.Tensor, factor: torch.Tensor
) -> torch.Tensor:
    """The product with a weight that was dequantised to bfloat16, its factor included."""
    return x @ (common.fp4_values(packed, scale, torch.float32) * factor).bfloat16().float().T


def fp4_linear_split(x: torch.Tensor, packed: torch.Tensor, scale: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    """The product as four partial sums over k, added in the end."""
    weight = common.fp4_values(packed, scale, torch.float32)
    return torch.stack([a @ b.T for a, b in zip(x.chunk(4, -1), weight.chunk(4, -1), strict=True)]).sum(0) * factor


def fp4_nibbles_swapped(
    x: torch.Tensor, packed: torch.Tensor, scale: torch.Tensor, factor: torch.Tensor
) -> torch.Tensor:
    """A fault: the high nibble comes first."""
    return common.fp4_linear(x, packed << 4 | packed >> 4, scale, factor)


def fp4_scale_of_pair(x: torch.Tensor, packed: torch.Tensor, scale: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    """A fault: the first of two scales is used for both groups of 16."""
    index = torch.arange(scale.shape[-1], device=scale.device) // 2 * 2
    first = scale.view(torch.uint8)[..., index].view(torch.float8_e4m3fn)
    return common.fp4_linear(x, packed, first, factor)


Fp4Quantizer = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


def _unrounded_scale(x: torch.Tensor, gscale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A fault: elements are divided by the scale before it is rounded to e4m3."""
    largest = x.float().unflatten(-1, (-1, 16)).abs().amax(dim=-1, keepdim=True)
    scale = (largest / (6 * gscale)).clamp_max(448)
    step = torch.where(scale > 0, scale * gscale, 1.0)
    codes, _ = common.fp4_quantize((x.float().unflatten(-1, (-1, 16)) / step).flatten(-2), torch.ones_like(gscale))
    # A block's largest element is 6, so its own scale there is 1 and the codes are those of the quotient.
    return codes, scale.squeeze(-1).to(torch.float8_e4m3fn)


def _flushed_scale(x: torch.Tensor, gscale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A fault: subnormal scales become 0."""
    codes, scale = common.fp4_quantize(x, gscale)
    return codes, torch.where(scale.float() < 2.0**-6, 0.0, scale.float()).to(torch.float8_e4m3fn)


def _truncated_codes(x: torch.Tensor, gscale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A fault: elements go to the next code towards 0."""
    blocks, (_, scale) = x.float().unflatten(-1, (-1, 16)), common.fp4_quantize(x, gscale)
    step = scale.float().unsqueeze(-1) * gscale
    grid = e2m1_table(x.device)[:8].float()
    down = torch.searchsorted(grid, blocks.abs() / torch.where(step > 0, step, torch.inf), right=True) - 1
    codes = (down + 8 * (blocks < 0)).to(torch.uint8).flatten(-2)
    return codes[..., 0::2] | codes[..., 1::2] << 4, scale


FP4_FAULTS: dict[str, Fp4Quantizer] = {
    "codes by the scale before its rounding": _unrounded_scale,
    "subnormal scales flushed": _flushed_scale,
    "codes rounded towards 0": _truncated_codes,
}
"""Other quantisers of activations that no problem may accept."""
