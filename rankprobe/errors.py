"""One base class, so that `except rankprobe.RankprobeError` catches everything rankprobe raises on purpose."""

__all__ = ["NothingThere", "RankprobeError"]


class RankprobeError(Exception):
    """What happened, for which model and layer, and what to do next."""


class NothingThere(RankprobeError):
    """The model has no part of the kind that was to be removed."""
