"""Every exception and warning that stoker raises.

    StokerError
    |-- SourceError(path, reason)                also an OSError: a data set cannot be read
    |-- DecodeError(index, location, reason)     also an OSError: one sample cannot be decoded
    |-- UnsupportedError(op, why, instead)       strict=True and something cannot run natively
    |-- ResumeError(field, in_state, here)       a state does not fit the loader it is loaded into
    `-- WorkerError(cause, remedy)               also a RuntimeError: worker processes cannot start
    StokerWarning                                a UserWarning: something was not as expected

Wrong arguments raise ``ValueError`` or ``TypeError`` with the given and the allowed values.
"""

from __future__ import annotations

from typing import Any


class StokerError(Exception):
    """Base of every exception that stoker defines."""


class SourceError(StokerError, OSError):
    """A data set cannot be read.

    Attributes:
        path: the file or folder at fault.
        reason: what is wrong with it and what to do.
    """

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(f"{path}: {reason}")
        self.path, self.reason = path, reason

    def __reduce__(self) -> tuple[type[SourceError], tuple[str, str]]:
        return type(self), (self.path, self.reason)


class DecodeError(StokerError, OSError):
    """One sample cannot be decoded.

    Attributes:
        index: index of the sample in its data set.
        location: its path.
        reason: the decoder's own words.
    """

    def __init__(self, index: int, location: str, reason: str) -> None:
        super().__init__(f"sample {index} ({location}): {reason}")
        self.index, self.location, self.reason = index, location, reason

    def __reduce__(self) -> tuple[type[DecodeError], tuple[int, str, str]]:
        return type(self), (self.index, self.location, self.reason)


class UnsupportedError(StokerError):
    """Something cannot run natively, and ``strict=True`` forbids the slower way.

    Attributes:
        op: the transform, dataset class or argument that prevents it.
        why: the reason.
        instead: what to do.
    """

    def __init__(self, op: str, why: str, instead: str) -> None:
        super().__init__(f"{op}: {why}; {instead}")
        self.op, self.why, self.instead = op, why, instead

    def __reduce__(self) -> tuple[type[UnsupportedError], tuple[str, str, str]]:
        return type(self), (self.op, self.why, self.instead)


class ResumeError(StokerError):
    """A state does not fit the loader that it is loaded into.

    Attributes:
        field: what differs, a key of the state.
        in_state: its value there.
        here: the loader's.
    """

    def __init__(self, field: str, in_state: Any, here: Any) -> None:
        super().__init__(
            f"the state is not one of this loader: {field} is {in_state!r} in the state and "
            f"{here!r} here"
        )
        self.field, self.in_state, self.here = field, in_state, here

    def __reduce__(self) -> tuple[type[ResumeError], tuple[str, Any, Any]]:
        return type(self), (self.field, self.in_state, self.here)


class WorkerError(StokerError, RuntimeError):
    """The worker processes of a loader cannot start, or cannot do what they are for.

    Attributes:
        cause: what prevents it.
        remedy: what to do.
    """

    def __init__(self, cause: str, remedy: str) -> None:
        super().__init__(f"{cause}. {remedy}")
        self.cause, self.remedy = cause, remedy

    def __reduce__(self) -> tuple[type[WorkerError], tuple[str, str]]:
        return type(self), (self.cause, self.remedy)


class StokerWarning(UserWarning):
    """Something was done, but not as a reader of the call would expect."""
