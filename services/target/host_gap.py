"""The time that the device idles because the host is busy."""

from __future__ import annotations


class HostGap:
    """Measures from the read that emptied the device to the next launch."""

    def __init__(self) -> None:
        self._idle_since_s: float | None = None

    def read(self, now_s: float) -> None:
        """The last launched step was read: the device has nothing left."""
        self._idle_since_s = now_s

    def wait(self) -> None:
        """There is nothing to launch, which is not the host's fault."""
        self._idle_since_s = None

    def launched(self, now_s: float) -> float:
        """Returns the gap before this launch in seconds; 0 when the device still had work."""
        since_s, self._idle_since_s = self._idle_since_s, None
        return 0.0 if since_s is None else now_s - since_s
