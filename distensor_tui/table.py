"""Every command of `distensor` as one row: help, completion, documents and the start of a command all read it.

A command of this wheel is a module with `options(parser)` and `run(options, path)`; a command of another wheel is an
entry point `main(arguments) -> exit code` of the group `distensor.verbs`. Adding one is a module and a row.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Group(StrEnum):
    """Where the help lists it."""

    LOOK = "Look"
    STEER = "Steer"
    SET_UP = "Set up and repair"
    MORE = "More"


@dataclass(frozen=True, kw_only=True, slots=True)
class Verb:
    """One command. `examples` are (command line, what it does); `then` says what to do next."""

    name: str
    group: Group
    about: str
    examples: tuple[tuple[str, str], ...]
    then: str
    module: str = ""
    """Of this wheel: the module of the command."""
    wheel: str = ""
    """Of another wheel: what to give to `pip install`."""
    words: tuple[str, ...] = ()
    """What may follow, for completion."""
    flags: tuple[str, ...] = ()
    """Its options where the parser is another wheel's, for completion."""
    planned: bool = False
    """Named, but no version has it yet: it is refused by name."""


_SERVER = "distensor-server"

VERBS: tuple[Verb, ...] = (
    Verb(
        name="status",
        group=Group.LOOK,
        about="Say whether this machine earns, how much, and whether all is well.",
        module="distensor_tui.commands.status",
        examples=(
            ("distensor status", "the facts, one a line"),
            ("distensor status --json", "the same for a script"),
        ),
        then="Not earning? `distensor why` lists what is in the way.",
    ),
    Verb(
        name="why",
        group=Group.LOOK,
        about="List every condition for working, open or closed, with its reading and limit.",
        module="distensor_tui.commands.why",
        examples=(
            ("distensor why", "all conditions"),
            ("distensor why --json", "the same for a script"),
        ),
        then="Change a limit with `distensor limits set`, end a pause with `distensor resume`.",
    ),
    Verb(
        name="devices",
        group=Group.LOOK,
        about="Show the devices with all their readings, and the reason for each one that is not used.",
        module="distensor_tui.commands.devices",
        examples=(
            ("distensor devices", "one device a line"),
            ("distensor devices cpu", "all that is known of one, and why the rest is not"),
            ("distensor devices --benchmark", "measure how fast they are"),
            ("distensor devices --json", "for a script"),
        ),
        then="A device is missing? `distensor doctor` looks at drivers and permissions.",
    ),
    Verb(
        name="jobs",
        group=Group.LOOK,
        about="Show the running jobs and this machine's workers in them; for a trainer, the account's jobs at the hub.",
        module="distensor_tui.commands.jobs",
        examples=(
            ("distensor jobs", "jobs and workers of this machine"),
            ("distensor jobs --json", "for a script"),
            ("distensor jobs list", "the account's jobs at the hub of DISTENSOR_TOKEN, those that wait first"),
            (
                "distensor jobs explain j_1f2e",
                "why each rank is where it is, why other nodes have none, what is missing",
            ),
            ("distensor jobs cancel j_1f2e", "end one"),
        ),
        then="No job? `distensor why` says what is in the way, or that the hub has none.",
        words=("list", "show", "explain", "cancel"),
    ),
    Verb(
        name="earnings",
        group=Group.LOOK,
        about="Show what was earned and used, by day, job or device, and each unit beside the hub's books.",
        module="distensor_tui.commands.earnings",
        examples=(
            ("distensor earnings", "today, 7 and 30 days, energy, and whether the books agree"),
            ("distensor earnings --by job --since 2026-01-01", "a statement; also --by day, --by device"),
            ("distensor earnings --csv > earnings.csv", "for a spreadsheet"),
            ("distensor earnings --units", "single units: here and at the hub"),
            ("distensor earnings --json", "for a script"),
        ),
        then="Screen 4 of the dashboard shows them over time.",
    ),
    Verb(
        name="logs",
        group=Group.LOOK,
        about="Print the last events and the last lines of the workers' log files, and with -f the new ones.",
        module="distensor_tui.commands.logs",
        examples=(
            ("distensor logs", "the last events, and what the workers print"),
            ("distensor logs -f", "follow until Ctrl-C"),
            ("distensor logs --worker 0", "what one worker prints, by its rank or id"),
            ("distensor logs --supervisor", "the supervisor's own log file"),
            ("distensor logs --events -n 5 --json", "the last five events, one JSON object a line"),
        ),
        then="`distensor bugreport` packs the full logs for somebody who helps you.",
    ),
    Verb(
        name="pause",
        group=Group.STEER,
        about="Stop working and earning, for a time or until resumed.",
        module="distensor_tui.commands.pause",
        examples=(
            ("distensor pause", "until `distensor resume`"),
            ("distensor pause --for 2h", "then work again by itself"),
            ("distensor pause --until 18:00", "the same"),
        ),
        then="`distensor resume` ends it early.",
    ),
    Verb(
        name="resume",
        group=Group.STEER,
        about="Work again after a pause or drain.",
        module="distensor_tui.commands.resume",
        examples=(("distensor resume", "take work again"),),
        then="`distensor status` shows the new state.",
    ),
    Verb(
        name="retry",
        group=Group.STEER,
        about="Start workers again that failed too often and were given up.",
        module="distensor_tui.commands.retry",
        examples=(("distensor retry", "all of them"), ("distensor retry w-17", "this one")),
        then="`distensor logs` says why they failed; `distensor jobs` shows whether they run now.",
    ),
    Verb(
        name="drain",
        group=Group.STEER,
        about="Finish the running work and take no more.",
        module="distensor_tui.commands.drain",
        examples=(("distensor drain", "before a reboot, for example"),),
        then="`distensor status` says PAUSED when all is done; `distensor resume` takes work again.",
    ),
    Verb(
        name="limits",
        group=Group.STEER,
        about="Read or change what this machine may use: temperature, power, memory, hours, traffic.",
        module="distensor_tui.commands.limits",
        words=("get", "set", "unset"),
        examples=(
            ("distensor limits get", "all limits with their values"),
            ("distensor limits set cpu_workers 2", "change one"),
            ("distensor limits unset cpu_workers", "back to the default"),
        ),
        then="`distensor why` shows each limit beside its reading.",
    ),
    Verb(
        name="auth",
        group=Group.SET_UP,
        about="Give this machine its key, ask where the key comes from, or forget it.",
        wheel=_SERVER,
        words=("login", "status", "logout"),
        flags=("--json", "--stdin", "--no-test", "--in-file", "--socket", "--state", "--system"),
        examples=(
            ("distensor auth login", "asks for the key, tests and keeps it"),
            ("distensor auth login --stdin < key.txt", "the same for a script"),
            ("distensor auth status", "which key is used, and from where"),
            ("sudo distensor auth login --system", "for the service of the whole machine"),
        ),
        then="`distensor status` shows the hub's answer.",
    ),
    Verb(
        name="doctor",
        group=Group.SET_UP,
        about="Check this machine's set-up and say how to repair what is wrong.",
        wheel=_SERVER,
        flags=("--json", "--host", "--socket", "--state"),
        examples=(("distensor doctor", "every check with its repair"), ("distensor doctor --json", "for a script")),
        then="Nothing helps? `distensor bugreport` packs what others need to help you.",
    ),
    Verb(
        name="bugreport",
        group=Group.SET_UP,
        about="Pack versions, settings, checks and logs without secrets into a file; nothing is sent.",
        wheel=_SERVER,
        flags=("--json", "--output", "--config", "--hide-addresses", "--socket", "--state"),
        examples=(("distensor bugreport", "lists the contents and writes distensor-bugreport-*.tar.gz"),),
        then="Look into the file before you hand it to somebody.",
    ),
    Verb(
        name="service",
        group=Group.SET_UP,
        about="Run the supervisor in the background, from the start of the machine or session.",
        wheel=_SERVER,
        words=("install", "uninstall", "status"),
        flags=("--json", "--system", "--dry-run"),
        examples=(
            ("distensor service install", "set up and start it"),
            ("distensor service status", "is it running, how did it end last"),
        ),
        then="`distensor status` shows that it works.",
    ),
    Verb(
        name="uninstall",
        group=Group.SET_UP,
        about="Remove disTensor from this machine, exactly what was installed.",
        wheel=_SERVER,
        flags=("--json", "--purge", "--dry-run", "--system"),
        examples=(
            ("distensor uninstall --dry-run", "list what would be removed"),
            ("distensor uninstall --purge", "identity, receipts and settings too"),
        ),
        then="Earnings stay with your account at the hub.",
    ),
    Verb(
        name="completion",
        group=Group.SET_UP,
        about="Print a script that completes `distensor` commands in your shell.",
        module="distensor_tui.commands.completion",
        words=("bash", "zsh", "fish"),
        examples=(
            ("source <(distensor completion bash)", "in this bash"),
            ("distensor completion zsh > ~/.zfunc/_distensor", "for zsh, with ~/.zfunc in fpath"),
            ("distensor completion fish > ~/.config/fish/completions/distensor.fish", "for fish"),
        ),
        then="Open a new shell and press Tab behind `distensor`.",
    ),
    Verb(
        name="demo",
        group=Group.MORE,
        about="Train a small model over workers on this machine, to see how it works.",
        wheel="distensor[worker]",
        flags=("--json", "--no-ui", "--steps", "--screenshot"),
        examples=(("distensor demo", "starts hub and workers, trains, ends them"),),
        then="`distensor --demo` shows the dashboard with a recording.",
    ),
    Verb(
        name="bandwidth",
        group=Group.MORE,
        about="Say what each way to agree would send for a model, and how long that takes on given links.",
        wheel="distensor",
        flags=("--json", "--params", "--workers", "--down", "--up", "--value-bytes", "--sites"),
        examples=(("distensor bandwidth --params 1.2e9 --workers 32 --down 100 --up 10", "for a home link"),),
        then="What a run really sends is counted: screen 3 of the dashboard shows it by link.",
    ),
    Verb(
        name="hub",
        group=Group.MORE,
        about="Run a hub, where nodes and trainers meet.",
        wheel="distensor",
        flags=("--json", "--state", "--listen", "--node-tokens"),
        examples=(("distensor hub --help", "its options"),),
        then="Give each provider one of the join tokens that it prints.",
    ),
    Verb(
        name="relay",
        group=Group.MORE,
        about="Forward encrypted bytes between machines of a hub's jobs who cannot reach each other.",
        wheel="distensor",
        flags=(
            "--json",
            "--hub",
            "--authority",
            "--listen",
            "--connections",
            "--job-connections",
            "--job-gigabytes",
            "--rate",
        ),
        examples=(("distensor relay --help", "its options"),),
        then="Start the hub with `--relay HOST:PORT`, so that it tells the members of it.",
    ),
    Verb(
        name="aggregator",
        group=Group.MORE,
        about="Take one copy of each replica's sparse update and hand everybody the set of all.",
        wheel="distensor",
        flags=(
            "--json",
            "--state",
            "--host",
            "--name",
            "--jobs",
            "--message-megabytes",
            "--job-gigabytes",
            "--rate",
        ),
        examples=(("DISTENSOR_API_KEY=dtj_... distensor aggregator --host 192.0.2.7", "the key is needed once"),),
        then="A trainer asks for it with `sync_options={'topology': 'aggregator'}`.",
    ),
    Verb(
        name="cloud",
        group=Group.MORE,
        about="Run a hub with an HTTP API: accounts, keys, nodes, jobs, live runs, metrics.",
        wheel="distensor[cloud]",
        flags=(
            "--json",
            "--state",
            "--database",
            "--listen",
            "--advertise",
            "--http",
            "--http-host",
            "--tls-certificate",
            "--tls-key",
            "--plain-http",
            "--trust-proxy",
            "--cors-origin",
            "--open-metrics",
        ),
        examples=(
            ("distensor cloud", "a hub, and its API on this machine only"),
            ("distensor cloud --http 0.0.0.0:8443 --tls-certificate chain.pem --tls-key key.pem", "for others"),
        ),
        then="docs/api.md shows each call; `distensor hub key create` makes the first key.",
    ),
    Verb(
        name="record",
        group=Group.MORE,
        about="Write what the supervisor reports to a file that the dashboard can replay.",
        module="distensor_tui.commands.record",
        examples=(
            ("distensor record run.jsonl --seconds 60", "a minute of it"),
            ("distensor --replay run.jsonl", "show it"),
        ),
        then="The file holds names of jobs and machines: look into it before you hand it on.",
    ),
    Verb(
        name="help",
        group=Group.MORE,
        about="Explain a command, or how commands end.",
        module="distensor_tui.commands.help",
        words=("exit-codes",),
        examples=(("distensor help pause", "one command"), ("distensor help exit-codes", "what each number means")),
        then="`distensor` alone opens the dashboard, where ? explains the keys.",
    ),
)

BY_NAME = {verb.name: verb for verb in VERBS}
