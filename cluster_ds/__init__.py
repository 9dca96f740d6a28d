"""cluster-ds: fine-tuning on a small, balanced, weighted part of the data, on DeepSpeed (CluSTER, arXiv 2609.12584)."""

import logging
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .allocation import Packing
    from .engine import ClusterEngine
    from .initialization import initialize
    from .plan import Plan
    from .planning import make_plan

__version__ = "0.1.0"
__all__ = ["ClusterEngine", "Packing", "Plan", "initialize", "make_plan"]

_MODULES = {
    "ClusterEngine": "engine", "Packing": "allocation", "Plan": "plan", "initialize": "initialization",
    "make_plan": "planning",
}  # fmt: skip

# Said by every rank while DeepSpeed is imported; a run's first line names the device.
logging.getLogger("DeepSpeed").addFilter(lambda record: "Setting accelerator to CPU" not in str(record.msg))


def __getattr__(name: str) -> Any:
    """Load what is asked for: torch, scikit-learn and DeepSpeed take seconds."""
    if name in _MODULES:
        return getattr(import_module(f".{_MODULES[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
