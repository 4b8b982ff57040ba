"""The stored results as figures read them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from experiments.paper.measurement import Measurement

Record = Mapping[str, Any]


class Results:
    """Finds the stored record of a measurement.

    basis: what else has decided the results that count. any_code: where there is none with this basis, the newest one
        with another counts as well.
    """

    def __init__(self, records: Iterable[Record], basis: Mapping[str, Any], any_code: bool = False) -> None:
        self._basis, self._any_code = basis, any_code
        self._by_key: dict[str, Record] = {}
        self._by_identity: dict[str, Record] = {}
        for record in records:
            self._by_key[record["key"]] = record
            older = self._by_identity.get(record["identity"])
            if older is None or older["unix_s"] <= record["unix_s"]:
                self._by_identity[record["identity"]] = record

    def record(self, wanted: Measurement) -> Record | None:
        """The whole record; None if there is none that counts."""
        found = self._by_key.get(wanted.key(self._basis))
        return self._by_identity.get(wanted.identity()) if found is None and self._any_code else found

    def find(self, wanted: Measurement) -> Record | None:
        """What was found; None if there is nothing, for which `why` has the reason."""
        record = self.record(wanted)
        result = None if record is None else record.get("result")
        return None if result is None or "why" in result else result

    def why(self, wanted: Measurement) -> str:
        """Why there is no result, in a sentence; "" if there is one."""
        record = self.record(wanted)
        if record is None:
            return "not computed yet"
        return (record.get("result") or {}).get("why") or record.get("why", "")

    def is_current(self, wanted: Measurement) -> bool:
        """Whether what `record` finds was made by the present code."""
        return wanted.key(self._basis) in self._by_key
