"""`distensor bandwidth`: what each way to agree would send for a model, and how long that takes on given links."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from distensor.core.commandline import Exit, UsageParser
from distensor.core.errors import ConfigError
from distensor.core.update_bytes import Topology, Traffic, traffic_of_all

OK = 0
MEGABIT = 1e6 / 8


def main(argv: list[str]) -> int:
    """Run the verb; the status for the shell."""
    try:
        options = _parser().parse_args(argv)
        rows = traffic_of_all(options.params, options.workers, options.value_bytes, options.sites)
    except SystemExit as exit_:  # argparse ends this way, after --help too
        return int(exit_.code or 0)
    except ConfigError as error:
        sys.stderr.write(f"distensor bandwidth: {error}\n")
        return Exit.USAGE
    facts = [_facts(row, options, rows[0]) for row in rows]
    text = json.dumps({"v": 1, "rows": facts}) if options.json else _table(facts, options)
    sys.stdout.write(text + "\n")
    return OK


def _parser() -> UsageParser:
    parser = UsageParser(
        prog="distensor bandwidth",
        description="What each method would send in a step of data-parallel training, and how long that takes. "
        "Predicted from the wire format; nothing is measured.",
        epilog="example: distensor bandwidth --params 1.2e9 --workers 32 --down 100 --up 10",
    )
    parser.add_argument("--params", type=float, required=True, help="parameters of the model, such as 1.2e9")
    parser.add_argument("--workers", type=int, required=True, help="replicas that agree")
    parser.add_argument("--down", type=_rate, required=True, metavar="MBIT", help="of a worker's link, in Mbit/s")
    parser.add_argument("--up", type=_rate, required=True, metavar="MBIT", help="of a worker's link, in Mbit/s")
    parser.add_argument(
        "--value-bytes", type=int, choices=(2, 4), default=2, help="of a dense gradient's element (default: 2, bf16)"
    )
    parser.add_argument(
        "--sites", type=int, default=2, help="with an aggregator each, of the hybrid topology (default: 2)"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object")
    return parser


def _rate(text: str) -> float:
    value = float(text)
    if not 0 < value < 1e9:
        raise argparse.ArgumentTypeError(f"{text} is not a number of Mbit/s above 0")
    return value


def _facts(row: Traffic, options: argparse.Namespace, ring: Traffic) -> dict[str, Any]:
    return {
        "method": row.method,
        "topology": row.topology.value,
        "up_bytes": round(row.up),
        "down_bytes": round(row.down),
        "seconds": row.seconds(up_rate=options.up * MEGABIT, down_rate=options.down * MEGABIT),
        "up_reduction": ring.up / row.up,
        "down_reduction": ring.down / row.down,
        "aggregator_up_bytes": round(row.aggregator_up),
        "aggregator_down_bytes": round(row.aggregator_down),
    }


def _table(facts: list[dict[str, Any]], options: argparse.Namespace) -> str:
    lines = [
        f"a step of {options.params:.3g} parameters, {options.workers} workers, "
        f"{options.down:g} Mbit/s down, {options.up:g} Mbit/s up",
        f"{'':26}{'':16}{'up MB':>10}{'down MB':>10}{'network s':>10}{'less than ring: up, down':>26}"
        f"{'aggregator MB: up':>18}",
    ]
    lines += [
        f"{fact['method']:26}{fact['topology']:16}{fact['up_bytes'] / 1e6:10,.2f}{fact['down_bytes'] / 1e6:10,.2f}"
        f"{fact['seconds']:10,.2f}{fact['up_reduction']:15,.0f}x{fact['down_reduction']:9,.0f}x"
        + (f"{fact['aggregator_up_bytes'] / 1e6:18,.1f}" if fact["aggregator_up_bytes"] else "")
        for fact in facts
    ]
    return "\n".join([*lines, _note(options)])


def _note(options: argparse.Namespace) -> str:
    return (
        f"{Topology.RING.value}: {options.value_bytes} bytes an element, 2 (W - 1) / W of the model each way. "
        "An aggregator spares a worker the upload\n"
        "only, and needs a link that carries its own columns; the hybrid topology has one in each of "
        f"{options.sites} sites:\n"
        "workers choose other entries, so what comes back is the sum of all. Methods that exchange every so many\n"
        "steps are counted on average; theirs come in bursts. All of it is predicted, nothing measured."
    )
