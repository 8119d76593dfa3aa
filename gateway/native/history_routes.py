"""Routes of the time series that the playground draws."""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import FastAPI

from gateway.acceptance_history import INTERVAL_S
from gateway.serving import Gateway


def add_history_routes(app: FastAPI, gateway: Gateway) -> None:
    """Adds the route."""

    @app.get("/speculation_history", tags=["server"])
    async def speculation_history(model: str | None = None) -> dict[str, Any]:
        name, _ = gateway.pool.model(model)
        served = [
            found
            for found in await asyncio.gather(*(link.ask_model() for link in gateway.pool.links))
            if found is not None and gateway.pool.served_name(found) == name
        ]
        changes = sorted(
            (each for found in served for each in found.weight_changes),
            key=lambda each: each.time_s,
        )
        return {
            "model": name,
            "weight_versions": sorted({found.weight_version for found in served}),
            "interval_s": INTERVAL_S,
            "intervals": [
                {
                    "begin_time": each.begin_s,
                    "verified_round_count": each.num_verified_rounds,
                    "accepted_token_count": each.num_accepted,
                }
                for each in gateway.metrics.acceptance.intervals(name)
            ],
            "weight_changes": [
                {
                    "time": each.time_s,
                    "algorithm": each.algorithm or None,
                    "weight_version": each.version,
                }
                for each in changes
            ],
        }
