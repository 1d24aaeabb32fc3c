"""The version, alone, so that building and `--version` import nothing else."""

__version__ = "0.1.0"
