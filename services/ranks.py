"""How many processes share a model, and on which hosts they run."""

from __future__ import annotations

from dataclasses import dataclass

from shared.settings import address_problems


@dataclass(frozen=True, slots=True)
class Ranks:
    """The processes of a model, numbered by rank: `pp_size` stages of `tp_size` ranks each. They
    are spread evenly over hosts; the first host has the first ranks.

    Attributes:
        tp_size: processes that share every layer of a stage.
        pp_size: stages; they compute one after another, so they save memory, not time.
        host: the number of this host, from 0.
        address: `HOST:PORT` of the first host, where all meet; None for a single host.
    """

    tp_size: int = 1
    pp_size: int = 1
    num_hosts: int = 1
    host: int = 0
    address: str | None = None

    @property
    def size(self) -> int:
        return self.tp_size * self.pp_size

    @property
    def num_here(self) -> int:
        """Number of processes of each host."""
        return self.size // self.num_hosts

    @property
    def here(self) -> range:
        """The ranks of this host."""
        return range(self.host * self.num_here, (self.host + 1) * self.num_here)

    @property
    def flags(self) -> str:
        """The flags that set the number of processes, as the beginning of a sentence."""
        words = f"--tp-size is {self.tp_size}"
        if self.pp_size > 1:
            words += f" and --pp-size {self.pp_size}, together {self.size},"
        if self.num_hosts > 1:
            words += f" on --nnodes {self.num_hosts}, {self.num_here} here,"
        return words

    @property
    def problems(self) -> list[str]:
        """A line for each setting that is invalid."""
        problems = []
        if self.size % self.num_hosts:
            problems.append(
                f"--nnodes is {self.num_hosts}; it must divide the number of processes, {self.size}"
            )
        if self.host >= self.num_hosts:
            problems.append(
                f"--node-rank is {self.host}; it must be below --nnodes, {self.num_hosts}"
            )
        if self.num_hosts > 1 and self.address is None:
            problems.append(
                f"--dist-init-addr is missing; --nnodes is {self.num_hosts}, and hosts meet at "
                f"HOST:PORT of the first"
            )
        if self.address is not None:
            is_path = self.address.startswith("unix:")
            problems += address_problems("--dist-init-addr", (self.address,))
            problems += ["--dist-init-addr is a path; hosts meet at HOST:PORT"] if is_path else []
        return problems
