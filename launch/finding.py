"""One result of an examination."""

from __future__ import annotations

import dataclasses

OK, WARN, FAIL = "ok", "look", "FAIL"


@dataclasses.dataclass(frozen=True)
class Finding:
    """`status` is OK, WARN or FAIL; `text` may have several lines."""

    status: str
    name: str
    text: str

    def __str__(self) -> str:
        """`[ ok ] name: first line`, further lines indented below it."""
        return f"[{self.status:^4}] {self.name}: " + self.text.replace("\n", "\n       ")
