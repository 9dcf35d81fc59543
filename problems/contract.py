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
    def make_inputs(generator, shape): ...       # tuple of tensors and scalars, on generator.device
    def output_specs(shape): ...                 # ((shape, dtype), ...) of the results
    def reference(*inputs): ...                  # eager PyTorch; one result as a tensor, several as a tuple
    def COST(shape): ...                         # -> Cost
    # optional, where rounding points matter:
    def anchor(*inputs): ...                     # fp64 truth; default: reference on float64 inputs
    def allowance(name, reference, anchor): ...  # allowed |error|, broadcastable to the output
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

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


@dataclass(frozen=True)
class Cost:
    """What one call must at least do: bytes moved to and from device memory, floating-point operations, and the unit
    that does them (``bf16``, ``fp8``, ``tf32``: tensor cores; ``fp32``: CUDA cores).
    """

    bytes: int
    flops: int
    unit: str


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
    make_inputs: Callable[..., tuple[Any, ...]]
    output_specs: Callable[[Shape], tuple[tuple[tuple[int, ...], Any], ...]]
    reference: Callable[..., Any]
    cost: Callable[[Shape], Cost]
    anchor: Callable[..., Any] | None
    allowance: Callable[..., Any] | None

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


def catalog() -> dict[str, ProblemRef]:
    """Slug -> problem, by family and name; reads folder names only."""
    return {
        folder.name: ProblemRef(folder.name, family)
        for family in FAMILIES
        for folder in sorted((ROOT / family).glob("*/"))
        if (folder / "problem.py").exists()
    }


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
    module = importlib.import_module(f"mkb_env.problems.{ref.family}.{ref.slug}.problem")
    needed = (
        "TITLE",
        "NUMBER",
        "MODEL",
        "INPUTS",
        "OUTPUTS",
        "HOST_VISIBLE",
        "WORKLOADS",
        "make_inputs",
        "output_specs",
        "reference",
        "COST",
    )
    missing = [name for name in needed if not hasattr(module, name)]
    if missing or not module.__doc__:
        raise ValueError(f"{ref.folder / 'problem.py'} must define {', '.join(missing) or 'a docstring'}")
    return Problem(
        ref=ref,
        module=module,
        task=module.__doc__.strip(),
        title=module.TITLE,
        number=module.NUMBER,
        model=module.MODEL,
        inputs=module.INPUTS,
        outputs=module.OUTPUTS,
        host_visible=module.HOST_VISIBLE,
        workloads=module.WORKLOADS,
        make_inputs=module.make_inputs,
        output_specs=module.output_specs,
        reference=module.reference,
        cost=module.COST,
        anchor=getattr(module, "anchor", None),
        allowance=getattr(module, "allowance", None),
    )
