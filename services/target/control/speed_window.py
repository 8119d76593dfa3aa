"""How fast the engine is in a while, against what plain decoding usually takes. No torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class SpeedWindow:
    """A while in which sequences decode.

    Attributes:
        plain_s: time that plain decoding usually takes for the tokens that were committed.
        elapsed_s: time that it took.
        num_rounds: draws of sequences.
        num_prompt_rows: rows of prompts that were read beside.
    """

    plain_s: float = 0.0
    elapsed_s: float = 0.0
    num_rounds: int = 0
    num_prompt_rows: int = 0

    def speed(self, prompt_row_s: float) -> float:
        """Returns its speed, 1 where plain decoding takes what it usually does.

        Args:
            prompt_row_s: how much longer each row of a prompt makes plain decoding.
        """
        return (self.plain_s + prompt_row_s * self.num_prompt_rows) / self.elapsed_s

    def add(self, turn: SpeedWindow) -> None:
        """A turn of the step loop ended."""
        self.plain_s += turn.plain_s
        self.elapsed_s += turn.elapsed_s
        self.num_rounds += turn.num_rounds
        self.num_prompt_rows += turn.num_prompt_rows

    def clear(self) -> None:
        """Another window begins."""
        self.plain_s = self.elapsed_s = 0.0
        self.num_rounds = self.num_prompt_rows = 0
