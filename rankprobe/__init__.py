"""rankprobe: see, layer by layer, whether the tokens inside a transformer collapse onto each other.

    import rankprobe

    with rankprobe.attach(model) as probe:
        model(**batch)
    print(probe.report())
"""

from rankprobe.errors import RankprobeError
from rankprobe.probe import Probe, attach
from rankprobe.report import Report, load

__all__ = ["Probe", "RankprobeError", "Report", "attach", "load"]
__version__ = "0.1.0"
