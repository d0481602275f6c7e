# SPDX-License-Identifier: Apache-2.0
"""The results file: one JSON, written after every measurement, so that a run that was interrupted goes on where it stopped."""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.machine import ROOT, describe, git_state

CHECKOUT = "<checkout>"
"""Stands in the files for the folder that this checkout is in."""


def without_checkout(text: str) -> str:
    """The text without the path of this checkout: results are committed, and hold on any machine."""
    return text.replace(str(ROOT), CHECKOUT)


class Results:
    """Entries by series and key; each with the settings and the commit it was measured under."""

    def __init__(self, path: Path, fresh: bool = False) -> None:
        self.path = path
        self.data: dict[str, Any] = {"machine": {}, "command": [], "series": {}}
        if path.exists() and not fresh:
            self.data = json.loads(path.read_text().replace(CHECKOUT, str(ROOT)))

    def begin(self, command: Sequence[str]) -> None:
        """Note the machine as it is now and the command that measures."""
        self.data["machine"] = describe()
        self.data["command"] = list(command)
        self._write()

    def commands(self) -> list[str]:
        """Every command that measured something, in the order of the entries."""
        entries = [entry for of_series in self.data["series"].values() for entry in of_series.values()]
        return list(dict.fromkeys(" ".join(entry["command"]) for entry in entries))

    def entries(self, series: str) -> dict[str, dict[str, Any]]:
        """All entries of a series by key."""
        found: dict[str, dict[str, Any]] = self.data["series"].get(series, {})
        return found

    def measured(self, series: str) -> list[dict[str, Any]]:
        """The entries that hold measurements."""
        return [entry for entry in self.entries(series).values() if not {"skipped", "error"} & entry.keys()]

    def done(self, series: str, key: str, settings: dict[str, Any]) -> bool:
        """Whether the key was measured under the same settings; what was skipped or failed is tried again."""
        entry = self.entries(series).get(key)
        return entry is not None and not {"skipped", "error"} & entry.keys() and entry["settings"] == settings

    def put(self, series: str, key: str, settings: dict[str, Any], entry: dict[str, Any]) -> None:
        """Store one entry and write the file."""
        stamp = {
            "settings": settings,
            "command": self.data["command"],
            "at": time.strftime("%Y-%m-%d %H:%M:%S"),
            **git_state(),
        }
        self.data["series"].setdefault(series, {})[key] = entry | stamp
        self._write()

    def _write(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        staging = self.path.with_suffix(".json.tmp")
        staging.write_text(without_checkout(json.dumps(self.data, indent=1)) + "\n")
        os.replace(staging, self.path)


def spread(values: Sequence[float]) -> dict[str, Any]:
    """Median of repeats, with how far they lie apart."""
    middle = statistics.median(values)
    return {
        "median": middle,
        "min": min(values),
        "max": max(values),
        "spread": (max(values) - min(values)) / middle if middle else 0.0,
        "repeats": list(values),
    }
