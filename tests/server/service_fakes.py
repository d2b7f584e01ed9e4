"""systemctl and launchctl as small machines: they keep a service and answer as the real ones were seen to."""

from __future__ import annotations

from dataclasses import dataclass, field

from distensor_server.service.runner import Outcome


def ok(text: str = "") -> Outcome:
    return Outcome(code=0, text=text)


@dataclass
class FakeSystemctl:
    """Call it as a Runner. `refuses` maps a subcommand to what it says when it fails."""

    refuses: dict[str, str] = field(default_factory=dict)
    calls: list[str] = field(default_factory=list)
    active: str = "inactive"
    enabled: bool = False
    last_exit: int | None = None
    reachable: bool = True
    environment: str = ""
    """What it answers to show-environment."""

    def __call__(self, *words: str) -> Outcome:
        assert words[0] == "systemctl"
        rest = [word for word in words[1:] if word != "--user"]
        self.calls.append(" ".join(words))
        if not self.reachable:
            return Outcome(code=1, text="Failed to connect to bus: No medium found")
        if rest[0] in self.refuses:
            return Outcome(code=1, text=self.refuses[rest[0]])
        if rest[0] == "show-environment":
            return ok(self.environment)
        if rest[0] == "show":
            return ok(self._show(rest))
        if rest[0] == "enable":
            self.enabled = True
        elif rest[0] == "restart":
            self.active = "active"
        elif rest[0] == "disable":
            self.active, self.enabled = "inactive", False
        return ok()

    def _show(self, rest: list[str]) -> str:
        if "--property=Version" in rest:
            return "Version=252.38-1~deb12u1"
        code = "0" if self.last_exit is None else "1"
        pid = 4242 if self.active == "active" else 0
        return (
            f"ExecMainCode={code}\nExecMainStatus={self.last_exit or 0}\nMainPID={pid}\n"
            f"LoadState=loaded\nActiveState={self.active}\nUnitFileState={'enabled' if self.enabled else 'disabled'}"
        )


@dataclass
class FakeLaunchctl:
    """Call it as a Runner. A service that was booted out stays for `lingers` more looks, as a draining one does."""

    calls: list[str] = field(default_factory=list)
    gui: bool = True
    lingers: int = 0
    loaded: str | None = None
    going: int = 0
    last_exit: str = "(never exited)"
    state: str = "running"
    bootstraps_while_there: int = 0

    def __call__(self, *words: str) -> Outcome:
        assert words[0] == "launchctl"
        self.calls.append(" ".join(words))
        return getattr(self, f"_{words[1]}")(*words[2:])

    def _version(self) -> Outcome:
        return ok("Darwin Bootstrapper Version 7.0.0")

    def _enable(self, _target: str) -> Outcome:
        return ok()

    def _print(self, target: str) -> Outcome:
        domain = target.rpartition("/")[0]
        if self.going:
            self.going -= 1
            if not self.going:
                self.loaded = None
        if self.loaded != domain:
            return Outcome(code=113, text="Bad request.\nCould not find service")
        return ok(PRINTED.format(target=target, state=self.state, last_exit=self.last_exit))

    def _bootstrap(self, domain: str, _plist: str) -> Outcome:
        if domain.startswith("gui/") and not self.gui:
            return Outcome(code=125, text="Bootstrap failed: 125: Domain does not support specified action")
        if self.loaded is not None:
            self.bootstraps_while_there += 1
            return Outcome(code=5, text="Bootstrap failed: 5: Input/output error")
        self.loaded = domain
        return ok()

    def _bootout(self, target: str) -> Outcome:
        if self.loaded != target.rpartition("/")[0]:
            return Outcome(code=3, text="Boot-out failed: 3: No such process")
        if self.lingers:
            self.going = self.lingers
            return Outcome(code=36, text="Boot-out failed: 36: Operation now in progress")
        self.loaded = None
        return ok()


PRINTED = """{target} = {{
	active count = 1
	path = /Users/ada/Library/LaunchAgents/org.distensor.server.plist
	type = LaunchAgent
	state = {state}

	program = /Users/ada/Library/Application Support/distensor/app/current/bin/distensor-server
	arguments = {{
		/Users/ada/Library/Application Support/distensor/app/current/bin/distensor-server
		run
	}}

	stdout path = /Users/ada/Library/Logs/distensor/service.log
	default environment = {{
		PATH => /usr/bin:/bin:/usr/sbin:/sbin
	}}

	environment = {{
		XPC_SERVICE_NAME => org.distensor.server
	}}

	domain = gui/501 [100005]
	minimum runtime = 10
	exit timeout = 120
	runs = 1
	pid = 812
	immediate reason = speculative
	last exit code = {last_exit}

	spawn type = daemon (3)
	properties = runatload | inferred program
}}"""
