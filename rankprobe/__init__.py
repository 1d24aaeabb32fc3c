"""rankprobe: see, layer by layer, whether the tokens inside a transformer collapse onto each other.

import rankprobe

with rankprobe.attach(model) as probe:
    model(**batch)
print(probe.report())
"""

from rankprobe._version import __version__
from rankprobe.errors import RankprobeError
from rankprobe.probe import Probe, attach
from rankprobe.report import Report, load

__all__ = ["Probe", "RankprobeError", "Report", "__version__", "attach", "load"]
