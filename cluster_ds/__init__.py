"""cluster-ds: fine-tuning on a small, balanced, weighted part of the data, on DeepSpeed (CluSTER, arXiv 2609.12584)."""

from typing import TYPE_CHECKING, Any

from .allocation import Packing
from .plan import Plan
from .planning import make_plan

if TYPE_CHECKING:
    from .engine import ClusterEngine
    from .initialization import initialize

__version__ = "0.1.0"
__all__ = ["ClusterEngine", "Packing", "Plan", "initialize", "make_plan"]


def __getattr__(name: str) -> Any:
    """Load DeepSpeed only when training is asked for: it takes seconds."""
    if name in ("ClusterEngine", "initialize"):
        from . import initialization

        return getattr(initialization, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
