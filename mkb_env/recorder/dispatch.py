"""The base of this project's dispatch modes."""

from __future__ import annotations

from torch.utils._python_dispatch import TorchDispatchMode


class QuickDispatchMode(TorchDispatchMode):
    """A dispatch mode that is ready at once.

    The default wraps a mode for ``torch.compile`` and imports 800 modules (2 s) on first use.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False
