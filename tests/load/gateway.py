"""`make load-gateway`: what the gateway itself costs.

Starts a gateway in front of a target without a model, and measures on one host:

  cost        the gateway's CPU time a chunk, many streams side by side, and the least it could be:
              that of a relay with the same libraries that does nothing else
  latency     age of tokens when the client has them, through the gateway and through the relay
  memory      resident memory after a tenth of the requests and after all of them
  disconnects clients that reset their connection: what is left open afterwards

With `--url` and `--target-maintenance` the last one runs against a stack that serves already.
Exits with 1 when a request failed, something was left open or memory grew by more than 5 %.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import urllib.parse
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.load.gateway_figures import Figures, Load, cost, disconnects, latency, memory
from tests.load.gateway_stack import HOST, NUM_PORTS, GatewayStack, gateway_stack
from tests.load.http_stream import StreamSettings

_MAX_GROWTH_PERCENT = 5.0


async def _resets(load: Load, stack: GatewayStack) -> Figures:
    return await disconnects(load, StreamSettings(HOST, stack.gateway.port, 1), stack.maintenance)


_MEASUREMENTS = {"cost": cost, "latency": latency, "memory": memory, "disconnects": _resets}


async def run(flags: argparse.Namespace) -> Mapping[str, Figures]:
    """Runs the measurements that can be made; returns them by name."""
    load = Load(
        num_clients=flags.clients,
        num_streams=flags.streams,
        num_requests=flags.requests,
        num_disconnects=flags.disconnects,
        duration_s=flags.duration_s,
        step_ms=flags.step_ms,
    )
    if flags.url is not None:
        url = urllib.parse.urlsplit(flags.url)
        settings = StreamSettings(url.hostname or HOST, url.port or 80, 1)
        return {"disconnects": await disconnects(load, settings, [flags.target_maintenance])}
    async with gateway_stack(flags.port, flags.step_ms, flags.workers) as stack:
        return {
            name: await _MEASUREMENTS[name](load, stack) for name in flags.only or _MEASUREMENTS
        }


def problems(figures: Mapping[str, Figures]) -> list[str]:
    """Returns what must not be, whatever the host."""
    found = [
        f"{name}: {values['failed']:g} requests failed"
        for name, values in figures.items()
        if values.get("failed")
    ]
    growth = figures.get("memory", {}).get("growth_percent", 0.0)
    if growth > _MAX_GROWTH_PERCENT:
        found.append(f"memory: grew by {growth:g} %; at most {_MAX_GROWTH_PERCENT:g} % is flat")
    left = figures.get("disconnects", {})
    found += [
        f"disconnects: {key} is {left[key]:g}"
        for key in left
        if key.endswith("_count") and left[key]
    ]
    return found


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="load-gateway",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--url", help="a gateway that serves; only disconnects are measured")
    parser.add_argument("--target-maintenance", default=f"{HOST}:50052")
    parser.add_argument("--only", action="append", choices=tuple(_MEASUREMENTS))
    parser.add_argument("--port", type=int, default=18000, help=f"first of {NUM_PORTS}")
    parser.add_argument("--workers", type=int, default=1, help="of the gateway")
    parser.add_argument("--streams", type=int, default=256, help="side by side")
    parser.add_argument("--clients", type=int, default=2, help="client processes")
    parser.add_argument("--step-ms", type=float, default=20.0, help="of the synthetic target")
    parser.add_argument("--duration-s", type=float, default=10.0, help="of the long streams")
    parser.add_argument("--requests", type=int, default=10_000, help="short ones, for memory")
    parser.add_argument("--disconnects", type=int, default=1_000)
    parser.add_argument("--out", type=Path, default=Path(".run/load"))
    return parser.parse_args(arguments)


def main() -> int:
    flags = parse(sys.argv[1:])
    figures = asyncio.run(run(flags))
    flags.out.mkdir(parents=True, exist_ok=True)
    (flags.out / "gateway.json").write_text(json.dumps(figures, indent=2) + "\n")
    for name, values in figures.items():
        print(f"{name}: " + ", ".join(f"{key} {value:g}" for key, value in values.items()))
    found = problems(figures)
    for problem in found:
        print(problem, file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
