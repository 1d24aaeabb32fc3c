"""rankprobe: see, layer by layer, whether the tokens inside a transformer collapse onto each other.

    import rankprobe

    with rankprobe.attach(model) as probe:
        model(**batch)
    print(probe.report())

Names are loaded when first used, so that importing the package, and the command's `--help`, does not import torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rankprobe._version import __version__
from rankprobe.errors import RankprobeError

if TYPE_CHECKING:
    from rankprobe.ablate import Ablation
    from rankprobe.collapse import Collapse
    from rankprobe.paths import PathSplit
    from rankprobe.probe import Probe, attach
    from rankprobe.report import Report, load
    from rankprobe.scanning import Scan, scan

__all__ = ["Ablation", "Collapse", "PathSplit", "Probe", "RankprobeError", "Report", "Scan", "__version__", "attach", "load", "scan"]

_HOMES = {
    "Ablation": "rankprobe.ablate",
    "Collapse": "rankprobe.collapse",
    "PathSplit": "rankprobe.paths",
    "Probe": "rankprobe.probe",
    "Report": "rankprobe.report",
    "attach": "rankprobe.probe",
    "Scan": "rankprobe.scanning",
    "load": "rankprobe.report",
    "scan": "rankprobe.scanning",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'rankprobe' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)
