"""What a restore costs from where it lies, beside prefilling: bytes and tokens over rates."""

from __future__ import annotations

from dataclasses import dataclass, field

SMOOTHING = 0.25
"""Weight of the newest measurement."""


@dataclass(slots=True, kw_only=True)
class Rates:
    """Measured or given; what is None is not known yet and never speaks against a restore.

    A rate that is given stays; one that was measured follows what is measured later.
    """

    prefill_tokens_s: float | None = None
    bytes_s: dict[str, float] = field(default_factory=dict)
    """By tier."""
    fixed: bool = False
    """Given: measurements change nothing."""

    def note_prefill(self, tokens: int, seconds: float) -> None:
        """Tell how long it took to prefill so many tokens."""
        if tokens > 0 and seconds > 0 and not self.fixed:
            self.prefill_tokens_s = _mixed(self.prefill_tokens_s, tokens / seconds)

    def note_restore(self, tier: str, size: int, seconds: float) -> None:
        """Tell how long it took to bring so many bytes to the device."""
        if size > 0 and seconds > 0 and not self.fixed:
            self.bytes_s[tier] = _mixed(self.bytes_s.get(tier), size / seconds)

    def restore_seconds(self, tier: str, size: int) -> float:
        """Return what restoring so many bytes takes; 0 where that is not known."""
        rate = self.bytes_s.get(tier)
        return size / rate if rate else 0.0

    def prefill_seconds(self, tokens: int) -> float:
        """Return what prefilling so many tokens takes; 0 where that is not known."""
        return tokens / self.prefill_tokens_s if self.prefill_tokens_s else 0.0

    def pays(self, tier: str, size: int, tokens: int) -> bool:
        """Say whether restoring ``size`` bytes is quicker than prefilling ``tokens``."""
        if self.prefill_tokens_s is None:
            return True
        return self.restore_seconds(tier, size) < tokens / self.prefill_tokens_s


def _mixed(old: float | None, new: float) -> float:
    return new if old is None else old + SMOOTHING * (new - old)
