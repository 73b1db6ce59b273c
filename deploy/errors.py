"""What a user did, or what a machine lacks, said in one paragraph; anything else is a bug and keeps its traceback."""

from __future__ import annotations


class SparseDeployError(Exception):
    """Base of every error meant for a user: one paragraph that says what was found, what was needed and what to do next."""

    exit_code = 2


class InputError(SparseDeployError):
    """The command line or a file given on it cannot be used as it is (exit code 2)."""


class CheckFailed(SparseDeployError):
    """A check ran and its result is bad: outputs differ, hashes differ, a bench is invalid (exit code 1)."""

    exit_code = 1


class MachineError(SparseDeployError):
    """The machine lacks something: a GPU, a library, disk space, a permission (exit code 3)."""

    exit_code = 3
