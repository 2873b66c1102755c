"""What a check of an environment says."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

State = Literal["ok", "warning", "fault"]


@dataclass(frozen=True)
class Finding:
    """What a check has found.

    Attributes:
        name: of the check.
        state: "ok", "warning" or "fault".
        what: the facts, in words.
        remedy: what to do; empty where nothing is wrong.
    """

    name: str
    state: State
    what: str
    remedy: str = ""


def failed(found: Sequence[Finding]) -> bool:
    """True where there is a fault."""
    return any(finding.state == "fault" for finding in found)


def as_text(found: Sequence[Finding]) -> str:
    """Findings for people, without colours."""
    lines = []
    for finding in found:
        lines.append(f"{finding.state:7} {finding.name}: {finding.what}")
        if finding.remedy:
            lines.append(f"        -> {finding.remedy}")
    return "\n".join(lines)
