"""One base class, so that `except rankprobe.RankprobeError` catches everything rankprobe raises on purpose."""

__all__ = ["RankprobeError"]


class RankprobeError(Exception):
    """What happened, for which model and layer, and what to do next."""
