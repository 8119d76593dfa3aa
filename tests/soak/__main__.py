"""`make soak`: an engine under random traffic and bad drafts for some minutes."""

from __future__ import annotations

import argparse
import secrets
import tempfile
from dataclasses import asdict
from pathlib import Path

import torch
from tqdm import tqdm

from shared.models.decoder import Decoder
from shared.runtime.device import device_named, launch_on
from tests.helpers.engines import tiny_decoder
from tests.helpers.mixtures import MIXTURES, load_mixture
from tests.helpers.shared_head_rounds import write_pair
from tests.soak.soak import Soak
from tests.soak.soak_time import SoakTime

SEEDS = {"target": 3, "other": 4}


def decoders(folder: Path, device: torch.device) -> dict[str, Decoder]:
    """Returns a target and a model that is often wrong, both random and tiny."""
    return {name: tiny_decoder(folder / name, device, seed=seed) for name, seed in SEEDS.items()}


def main() -> None:
    parser = argparse.ArgumentParser(prog="make soak", description=__doc__)
    parser.add_argument(
        "--minutes",
        type=float,
        default=5.0,
        help="how long, from the end of the first request on (%(default)s)",
    )
    parser.add_argument(
        "--warm-up-minutes",
        type=float,
        default=5.0,
        help="most until then, compiled kernels and graphs included (%(default)s)",
    )
    parser.add_argument("--seed", type=int, help="repeats a run; random when unset")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N (%(default)s)")
    parser.add_argument("--no-overlap", action="store_true", help="read each step before the next")
    parser.add_argument("--head", action="store_true", help="rounds on the device with a head")
    parser.add_argument(
        "--ahead", action="store_true", help="rounds with a model that drafts ahead, on a CPU"
    )
    parser.add_argument("--mixture", choices=tuple(MIXTURES), help="--head, of experts by its MTP")
    parser.add_argument("--selects", action="store_true", help="pushed trees on the device")
    parser.add_argument(
        "--adaptive", action="store_true", help="the target chooses what is drafted"
    )
    args = parser.parse_args()
    if (args.head or args.mixture or args.ahead) and args.selects:
        parser.error("--head, --mixture, --ahead, --selects: rounds have trees of one kind")
    seed = secrets.randbelow(2**31) if args.seed is None else args.seed
    device = device_named(args.device)
    launch_on(device)  # steps are taken on this thread
    print(f"soak: seed {seed} on {device}, {args.minutes:g} minutes", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        soak = _soak(args, Path(folder), device, seed)
        _run(soak, SoakTime(soak.figures, args.minutes * 60, args.warm_up_minutes * 60))


def _soak(args: argparse.Namespace, folder: Path, device: torch.device, seed: int) -> Soak:
    if args.mixture:
        pair = load_mixture(folder / "target", args.mixture, device)
        return Soak(pair.decoder, {}, seed, overlaps=not args.no_overlap, head=pair.head)
    models = decoders(folder, device)
    if args.head or args.ahead:
        pair = write_pair(folder / "pair", folder / "head", device)
        return Soak(
            pair.decoder,
            {},
            seed,
            overlaps=not args.no_overlap,
            head=pair.head,
            mapped=models["other"] if args.ahead else None,
        )
    return Soak(
        models["target"],
        models,
        seed,
        overlaps=not args.no_overlap,
        selects=args.selects,
        chooses=args.adaptive,
    )


def _run(soak: Soak, time: SoakTime) -> None:
    with tqdm(total=round(time.seconds), unit="s") as bar:
        for figures in soak.run(time.goes_on):
            bar.update(round(time.traffic_s) - bar.n)
            bar.set_postfix(finished=figures.num_finished, tokens=figures.num_tokens)
    print(f"soak: the first request had finished after {time.warm_up_s:.0f} s")
    for name, value in asdict(soak.figures).items():
        print(f"{name.removeprefix('num_'):>14} {value:>10,}")
    print(f"soak: all {soak.figures.num_compared} outputs were plain decoding's; no page was lost")


if __name__ == "__main__":
    main()
