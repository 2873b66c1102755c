"""What ``loader.explain()`` returns: which tier serves a loader, and why not a faster one."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Explanation:
    """How a loader is served. ``print()`` it.

    Attributes:
        tier: "lowered" (no Python per sample), "recorded" (the dataset's code, native pixels),
            "materialised" (the dataset's code, native decoding), "traced" (one of the two, nothing
            has run yet), "keyed" (torch's machinery, our order and seeds), or "torch" (torch's
            machinery and streams).
        op: what prevents the native engine: a transform, class or argument; empty when lowered.
        why: the reason.
        instead: what would help.
        facts: the rest, by name, in order.
    """

    tier: str
    op: str = ""
    why: str = ""
    instead: str = ""
    facts: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        titles = {
            "lowered": "lowered (native threads, no Python per sample)",
            "recorded": "recorded (the dataset's own code; its pixels in native threads)",
            "materialised": "materialised (the dataset's own code; JPEGs decoded natively for it)",
            "traced": "traced (recorded as far as the code allows; ask after some batches)",
            "keyed": "stock (the dataset's own code, with our order and keyed seeds)",
            "torch": "stock (torch's own loader, order and random streams)",
        }
        lines = {"tier": titles[self.tier]}
        if self.op:
            lines["because of"] = f"{self.op}: {self.why}"
        if self.instead:
            lines["instead"] = self.instead
        lines.update(self.facts)
        width = max(map(len, lines)) + 2
        return "\n".join(f"{name:<{width}}{text}" for name, text in lines.items())
