"""What a problem folder provides, and the loader that checks it.

``problems/<family>/<slug>/problem.py`` defines::

    \"\"\"The task text an agent reads: what is computed, inputs, outputs, formula, numerics, rules.\"\"\"
    TITLE = "one line"
    NUMBER = 28                                  # in the catalog
    MODEL = "Llama-3.1-8B"
    INPUTS = ("hidden_states", "residual", "weight")   # names of solve's arguments, in order
    OUTPUTS = ("y",)                             # names of the results
    HOST_VISIBLE = ()                            # integer inputs whose values host code may read
    WORKLOADS = {"full": {...}, "small": {...}, "heldout": [{...}, {...}]}
    def input_specs(shape): ...                  # per input: (sizes, dtype) of a tensor, or the value of a scalar
    def output_specs(shape): ...                 # ((sizes, dtype), ...) of the results
    def make_inputs(generator, shape): ...       # tuple of tensors and scalars, on generator.device
    def reference(*inputs): ...                  # eager PyTorch; one result as a tensor, several as a tuple
    def COST(shape): ...                         # -> Cost
    # where HOST_VISIBLE names inputs:
    def geometry(shape): ...                     # {name: values}, the same in every draw; make_inputs uses it too
    # optional, where rounding points matter:
    def anchor(*inputs): ...                     # fp64 truth; default: reference on float64 inputs
    def decode(name, outputs): ...               # the numbers that an output of codes stands for
    def allowance(name, inputs, reference, anchor): ...  # how far an output may lie from the truth

``checks.py`` beside it holds what shows that the problem is right and that its tolerance is neither blind nor brittle;
agents see neither file::

    INDEPENDENT = "scaled_dot_product_attention, request by request, float64"     # one line, for docs/problems.md
    def independent(inputs, truth): ...          # AssertionError unless the anchor's outputs agree with other means
    WRONG = {"one fault in words": function}     # called as reference is; the judge must reject each
    SECOND = {"how it differs in words": function}   # other right ways, in the input dtypes; the judge must accept
    COUNTED = (0.4, 1.1)                         # optional: bounds of COST's flops over the reference's matmul flops
"""

from __future__ import annotations

import functools
import importlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

FAMILIES = {
    "attention": "fused-attn",
    "kv_cache": "kv-cache",
    "mlp_norm": "mlp-norm",
    "moe": "moe",
    "quantized_projection": "quant-proj",
    "linear_attention": "linear-attn",
}
"""Family folder -> stem of its environment id."""

DSLS = ("cute", "tirx")
ROOT = Path(__file__).parent
Shape = dict[str, Any]
Spec = Any
"""Of an input or output: (sizes, dtype) of a tensor, or the value of a scalar input (bool, int or float)."""

REQUIRED = (
    "TITLE",
    "NUMBER",
    "MODEL",
    "INPUTS",
    "OUTPUTS",
    "HOST_VISIBLE",
    "WORKLOADS",
    "input_specs",
    "output_specs",
    "make_inputs",
    "reference",
    "COST",
)
"""What every ``problem.py`` defines."""

SIMULATED_FLOPS, SIMULATED_BYTES = 50_000_000, 64 << 20
"""The largest held-out shape that the simulator judges: seconds a run, even for a plain kernel."""


@dataclass(frozen=True)
class Cost:
    """What one call must at least do: bytes moved to and from device memory, floating-point operations, and the unit
    that does them (``bf16``, ``fp8``, ``tf32``: tensor cores; ``3xtf32``: float32 as three products of split TF32
    operands; ``fp32``: CUDA cores).
    """

    bytes: int
    flops: int
    unit: str


@dataclass(frozen=True)
class Allowance:
    """How far an output may lie from the truth, where two bounds are needed.

    Every element's |error| is at most ``limit``; at most ``share`` of the output's elements err by more than ``usual``.
    So codes may be said to be right but for a few that a rounding in another order moves to the next code. Both are
    broadcastable to the output.
    """

    limit: torch.Tensor
    usual: torch.Tensor
    share: float


@dataclass(frozen=True)
class ProblemRef:
    """A problem found on disk, not yet imported (importing it loads torch)."""

    slug: str
    family: str

    @property
    def folder(self) -> Path:
        return ROOT / self.family / self.slug

    def baseline(self, dsl: str) -> Path | None:
        """Our verified kernel for ``dsl``, or None. Never shown to an agent."""
        path = self.folder / f"{dsl}.py"
        return path if path.exists() else None


@dataclass(frozen=True)
class Problem:
    """An imported problem."""

    ref: ProblemRef
    module: ModuleType
    task: str
    title: str
    number: int
    model: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    host_visible: tuple[str, ...]
    workloads: dict[str, Any]
    input_specs: Callable[[Shape], tuple[Spec, ...]]
    output_specs: Callable[[Shape], tuple[Spec, ...]]
    make_inputs: Callable[..., tuple[Any, ...]]
    reference: Callable[..., Any]
    cost: Callable[[Shape], Cost]
    geometry: Callable[[Shape], dict[str, Any]] | None = None
    anchor: Callable[..., Any] | None = None
    decode: Callable[..., Any] | None = None
    allowance: Callable[..., Any] | None = None

    @property
    def slug(self) -> str:
        return self.ref.slug

    def shapes(self, workload: str) -> list[Shape]:
        """The shapes of a workload: one for ``full`` and ``small``, several for ``heldout``.

        Raises:
            ValueError: if the workload's name is none of these.
        """
        if workload not in self.workloads:
            raise ValueError(f"workload must be one of {', '.join(sorted(self.workloads))}, got {workload!r}")
        shapes = self.workloads[workload]
        return list(shapes) if isinstance(shapes, list) else [shapes]

    def tensor_bytes(self, shape: Shape) -> int:
        """Bytes of all input and output tensors."""
        specs = (*self.input_specs(shape), *self.output_specs(shape))
        return sum(math.prod(spec[0]) * spec[1].itemsize for spec in specs if isinstance(spec, tuple))

    def fits_simulator(self, shape: Shape) -> bool:
        """Whether the simulator can be expected to judge ``shape`` within its time and memory."""
        return self.cost(shape).flops <= SIMULATED_FLOPS and self.tensor_bytes(shape) <= SIMULATED_BYTES


@functools.cache
def catalog() -> Mapping[str, ProblemRef]:
    """Slug -> problem, by family and name; reads folder names only, once in a process."""
    found = {
        folder.name: ProblemRef(folder.name, family)
        for family in FAMILIES
        for folder in sorted((ROOT / family).glob("*/"))
        if (folder / "problem.py").exists()
    }
    return MappingProxyType(found)


def find(slug: str) -> ProblemRef:
    """The problem of that slug.

    Raises:
        ValueError: naming the nearest slugs, if there is none.
    """
    problems = catalog()
    if slug in problems:
        return problems[slug]
    import difflib

    near = difflib.get_close_matches(slug, problems, n=3, cutoff=0.3)
    raise ValueError(f"no problem is called {slug!r}; nearest: {', '.join(near) or 'none'} (`mkb list` shows all)")


def load(slug: str) -> Problem:
    """Import a problem. Loads torch.

    Raises:
        ValueError: if there is no such problem, or its file lacks something the contract asks for.
    """
    ref = find(slug)
    module = _import(ref, "problem", REQUIRED)
    if module.HOST_VISIBLE and not hasattr(module, "geometry"):
        raise ValueError(f"{ref.folder / 'problem.py'} must define geometry(shape), as HOST_VISIBLE names inputs")
    if hasattr(module, "decode") and not hasattr(module, "allowance"):
        raise ValueError(f"{ref.folder / 'problem.py'} defines decode, so it must define allowance too")
    return Problem(
        ref=ref,
        module=module,
        task=(module.__doc__ or "").strip(),
        title=module.TITLE,
        number=module.NUMBER,
        model=module.MODEL,
        inputs=module.INPUTS,
        outputs=module.OUTPUTS,
        host_visible=module.HOST_VISIBLE,
        workloads=module.WORKLOADS,
        input_specs=module.input_specs,
        output_specs=module.output_specs,
        make_inputs=module.make_inputs,
        reference=module.reference,
        cost=module.COST,
        **{name: getattr(module, name, None) for name in ("geometry", "anchor", "decode", "allowance")},
    )


def load_checks(slug: str) -> ModuleType:
    """A problem's ``checks.py``. Loads torch.

    Raises:
        ValueError: if there is no such problem, or its file lacks something the contract asks for.
    """
    return _import(find(slug), "checks", ("INDEPENDENT", "independent", "WRONG", "SECOND"))


def _import(ref: ProblemRef, name: str, needed: tuple[str, ...]) -> ModuleType:
    path = ref.folder / f"{name}.py"
    if not path.exists():
        raise ValueError(f"{ref.slug} has no {name}.py; see {__name__} for what it holds")
    module = importlib.import_module(f"mkb_env.problems.{ref.family}.{ref.slug}.{name}")
    missing = [attribute for attribute in needed if not hasattr(module, attribute)]
    if missing or not module.__doc__:
        raise ValueError(f"{path} must define {', '.join(missing) or 'a docstring'}")
    return module
