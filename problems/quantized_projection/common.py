"""The quantised formats of this family, their quantisers and their draws.

FP8 is e4m3 without infinities (largest 448). NVFP4 is a tensor of 4-bit codes, two in a byte, with an e4m3 scale for
every 16 of them and one float32 factor for all. Quantisers work in float32 whatever the input's type, since codes are
defined by float32 divisions; everything else follows the type that is asked for. A division by a Python number would be
a multiplication by its reciprocal on a GPU, so divisors are tensors.
"""

from __future__ import annotations

import math

import torch

from mkb_env.problems.contract import Shape, Spec
from mkb_env.problems.drawing import normal, permutation, uniform

BLOCK = 128
"""Elements of an activation, and rows and columns of a weight, that share an FP8 scale."""
GROUP = 16
"""Elements that share an NVFP4 scale."""
FP8_MAX = 448.0
FP4_MAX = 6.0
SCALE_FLOOR = 1e-10
OUTLIER = 50.0


def fp8_round(x: torch.Tensor) -> torch.Tensor:
    """The nearest e4m3 numbers, ties to even, saturating at 448."""
    return x.clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)


def fp8_quantize(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """e4m3 codes of ``x`` [..., K] and float32 scales [..., K / 128]: the largest of 128 elements becomes 448."""
    blocks = x.float().unflatten(-1, (-1, BLOCK))
    largest = blocks.abs().amax(dim=-1, keepdim=True).clamp_min(SCALE_FLOOR)
    scale = largest / torch.full_like(largest, FP8_MAX)
    return fp8_round(blocks / scale).flatten(-2), scale.squeeze(-1)


def fp8_rows(codes: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The numbers that e4m3 codes [..., K] with a scale for every 128 [..., K / 128] stand for."""
    return (codes.to(dtype).unflatten(-1, (-1, BLOCK)) * scale.to(dtype).unsqueeze(-1)).flatten(-2)


def fp8_weight(codes: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The numbers that e4m3 codes [N, K] with a scale for every block of 128 x 128 stand for; N may end in a block."""
    rows, columns = codes.shape
    wide = scale.to(dtype).repeat_interleave(BLOCK, 0)[:rows].repeat_interleave(BLOCK, 1)[:, :columns]
    return codes.to(dtype) * wide


def fp8_linear(x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Quantised ``x`` [T, K] times the weight's transpose, [T, N] in float32 (float64 for float64 ``x``)."""
    wide = torch.promote_types(x.dtype, torch.float32)
    return fp8_rows(*fp8_quantize(x), wide) @ fp8_weight(weight, scale, wide).T


def fp4_pairs(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """[256, 2]: the two numbers in each byte, low nibble first."""
    byte = torch.arange(256, device=device)
    code = torch.stack([byte & 15, byte >> 4], dim=-1)
    exponent, mantissa = (code >> 1) & 3, code & 1
    halves = torch.where(exponent == 0, mantissa, (2 + mantissa) << (exponent - 1).clamp_min(0))
    return halves.to(dtype) * torch.where(code < 8, 0.5, -0.5)


def fp4_values(packed: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Code times block scale, exact in bfloat16: [..., K] of packed [..., K / 2] and scale [..., K / 16]."""
    codes = fp4_pairs(dtype, packed.device)[packed.int()].flatten(-2)
    return (codes.unflatten(-1, (-1, GROUP)) * scale.to(dtype).unsqueeze(-1)).flatten(-2)


def fp4_quantize(x: torch.Tensor, gscale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Packed codes [..., K / 2] and e4m3 scales [..., K / 16] of ``x`` [..., K], for the given factor [1]."""
    blocks, factor = x.float().unflatten(-1, (-1, GROUP)), gscale.float()
    largest = blocks.abs().amax(dim=-1, keepdim=True)
    scale = fp8_round(largest / (FP4_MAX * factor))
    step = scale.float() * factor
    ratio = blocks.abs() / torch.where(step > 0, step, 1.0)
    # Ties go to the even code: 0.25 down to 0, 0.75 up to 1, and so on.
    code = (ratio > 0.25).to(torch.uint8)
    for reached in (ratio >= 0.75, ratio > 1.25, ratio >= 1.75, ratio > 2.5, ratio >= 3.5, ratio > 5.0):
        code += reached
    code |= (blocks < 0).to(torch.uint8) << 3
    code = torch.where(step > 0, code, 0).flatten(-2)
    return code[..., 0::2] | code[..., 1::2] << 4, scale.squeeze(-1)


def fp4_factor(x: torch.Tensor) -> torch.Tensor:
    """The factor [1] with which the largest element of ``x`` becomes 448 x 6."""
    largest = x.float().abs().amax().reshape(1)
    return largest / torch.full_like(largest, FP8_MAX * FP4_MAX)


def fp4_linear(x: torch.Tensor, packed: torch.Tensor, scale: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    """``x`` [..., K], of which the product is wide enough, times an NVFP4 weight's transpose and ``factor`` [1]."""
    return (x @ fp4_values(packed, scale, x.dtype).T) * factor.to(x.dtype)


def fp8_weight_specs(rows: int, columns: int) -> tuple[Spec, Spec]:
    """Sizes and dtypes of a weight's codes and scales."""
    blocks = math.ceil(rows / BLOCK), math.ceil(columns / BLOCK)
    return ((rows, columns), torch.float8_e4m3fn), (blocks, torch.float32)


def fp4_specs(*sizes: int) -> tuple[Spec, Spec, Spec]:
    """Sizes and dtypes of an NVFP4 tensor's packed codes, scales and factor."""
    *outer, last = sizes
    return (
        ((*outer, last // 2), torch.uint8),
        ((*outer, last // GROUP), torch.float8_e4m3fn),
        ((1,), torch.float32),
    )


def spec_bytes(*specs: Spec) -> int:
    """Bytes of all these tensors."""
    return sum(math.prod(sizes) * dtype.itemsize for sizes, dtype in specs)


def draw_fp8_weight(generator: torch.Generator, rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Normal codes, and scales around K^-1/2 that keep a projection's results near the size of its inputs."""
    (sizes, dtype), (blocks, _) = fp8_weight_specs(rows, columns)
    codes = normal(generator, *sizes, dtype=dtype)
    return codes, uniform(generator, *blocks, low=0.5, high=1.5) * columns**-0.5


def fp4_of(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """``x`` [..., K] as an NVFP4 tensor: packed codes, scales, and the factor that suits it."""
    factor = fp4_factor(x)
    return *fp4_quantize(x, factor), factor


def draw_fp4_weight(
    generator: torch.Generator, rows: int, columns: int, gain: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """An NVFP4 weight of ``gain`` N(0, 1/K)."""
    return fp4_of(normal(generator, rows, columns, scale=gain * columns**-0.5))


def draw_rows(generator: torch.Generator, rows: int, columns: int, shape: Shape) -> torch.Tensor:
    """bfloat16 activations N(0, 1), with what ``shape`` asks for.

    ``gains`` = [a, b]: every row times 2^U(a, b). ``outliers``: this share of the elements times 50. ``row_factors``:
    as many rows at random places, each times its number.
    """
    x = normal(generator, rows, columns)
    if "gains" in shape:
        low, high = shape["gains"]
        x *= torch.exp2(uniform(generator, rows, 1, low=low, high=high))
    if "outliers" in shape:
        x *= torch.where(uniform(generator, rows, columns) < shape["outliers"], OUTLIER, 1.0)
    special = permutation(generator, rows)
    for place, factor in enumerate(shape.get("row_factors", ())):
        x[special[place : place + 1]] *= factor
    return x.bfloat16()


def draw_calibrated(
    generator: torch.Generator, rows: int, columns: int, shape: Shape
) -> tuple[torch.Tensor, torch.Tensor]:
    """Activations of :func:`draw_rows` and the NVFP4 factor that suits them, times ``shape``'s ``calibration``."""
    x = draw_rows(generator, rows, columns, shape)
    return x, fp4_factor(x) * shape.get("calibration", 1.0)
