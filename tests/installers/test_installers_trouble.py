"""Installing where something is in the way: a full disk, a read-only home, a hub or a supervisor beside it."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
from installer_kit import INSTALLERS, Box, may_mount

pytestmark = pytest.mark.timeout(180)
NO_SPACE = "No space left on device"


needs_mounts = pytest.mark.skipif(not may_mount(), reason="this machine lets no user mount anything")

IN_ITS_OWN_MOUNTS = """
mount -t tmpfs -o {options} tmpfs "$HOME" || exit 99
bash "$@"
code=$?
find "$HOME" -mindepth 1 >"$TMPDIR/left"
exit $code
"""


def installed_on(box: Box, options: str, *words: str) -> tuple[subprocess.CompletedProcess[str], list[str]]:
    """Install with the home on a disk of its own, which is gone afterwards; and what was left on it."""
    done = subprocess.run(
        ["unshare", "-rm", "bash", "-c", IN_ITS_OWN_MOUNTS.format(options=options), "mounts",
         str(INSTALLERS / "linux.sh"), *words],
        env=box.env, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120, check=False,
        start_new_session=True,
    )  # fmt: skip
    assert done.returncode != 99, done.stderr
    return done, (box.folder / "left").read_text().splitlines()


@needs_mounts
@pytest.mark.parametrize(
    ("size", "step", "said"),
    [
        ("nr_inodes=3", "folders", "is the disk full or read-only?"),
        (
            "size=400k",
            "packages",
            "the disk of {home}/.local/share/distensor is full; PyTorch needs about 1.5 GB there",
        ),
    ],
)
def test_a_disk_that_is_really_full_is_named_and_nothing_is_left(box: Box, size: str, step: str, said: str) -> None:
    done, left = installed_on(box, size, "--no-service")
    assert done.returncode == 1
    assert NO_SPACE in done.stderr
    assert said.format(home=box.home) in done.stderr
    assert f"stopped at: {step}" in done.stderr
    assert "nothing of this attempt is left" in done.stderr
    assert left == []


@needs_mounts
def test_a_home_that_is_really_read_only_is_named(box: Box) -> None:
    done, left = installed_on(box, "ro", "--no-service")
    assert done.returncode == 1
    assert f"{box.home}/.local/state/distensor cannot be made; is the disk full or read-only?" in done.stderr
    assert "stopped at: folders" in done.stderr
    assert left == []


def test_a_home_where_nothing_can_be_made_is_named(box: Box) -> None:
    """The kernel's own files: not even root makes a folder there. The same answer without mounting anything."""
    done = box.run("linux.sh", "--no-service", env={"HOME": "/proc/self/fdinfo"})
    assert done.returncode == 1
    assert "/proc/self/fdinfo/.local/state/distensor cannot be made; is the disk full or read-only?" in done.stderr
    assert "stopped at: folders" in done.stderr


FAILS = f"""#!/bin/sh
case "$*" in
    *'{{words}}'*) echo 'error: [Errno 28] {NO_SPACE}' >&2; exit 1 ;;
esac
exec {{real}} "$@"
"""


@pytest.mark.parametrize(
    ("tool", "words", "step", "said"),
    [
        ("cp", "SHA256SUMS", "wheels", "cannot be copied to "),
        ("cp", ".whl", "wheels", "cannot be copied to "),
        ("python", "-m venv", "environment", "PyTorch needs about 1.5 GB there"),
    ],
)
def test_a_tool_that_finds_the_disk_full(box: Box, tool: str, words: str, step: str, said: str) -> None:
    """The folder for temporary files, and the first files of the environment."""
    real = "/bin/cp"
    if tool == "python":
        real = f"{box.bin}/python.real"
        (box.bin / tool).rename(real)
    box.script(tool, FAILS.format(words=words, real=real))
    done = box.run("linux.sh", "--no-service")
    assert done.returncode == 1
    assert NO_SPACE in done.stderr
    assert said in done.stderr
    assert f"stopped at: {step}" in done.stderr
    assert box.tree() == {}
    assert not list(box.folder.glob("distensor.*"))


def test_a_hub_and_a_supervisor_started_by_hand_are_not_the_installers(box: Box) -> None:
    """--purge takes nothing of a hub that keeps its books beside ours, and no programs away that somebody runs."""
    books = box.home / ".local/state/distensor/hub/hub.sqlite"
    books.parent.mkdir(parents=True)
    books.write_text("books")
    before = box.tree()
    done = box.run("linux.sh", "--no-service")
    assert done.returncode == 0, done.stderr
    for words in ("Look at it: distensor", f'export PATH="{box.home}/.local/bin:$PATH"', "distensor auth login"):
        assert words in done.stdout
    assert "| DISTENSOR_API_KEY" not in done.stdout  # it did not come out of a pipe
    app = box.home / ".local/share/distensor"
    with subprocess.Popen(["bash", "-c", f"exec -a '{app}/venv.x/bin/python' sleep 300"]) as by_hand:
        try:
            lock = box.home / ".local/state/distensor/server/lock"
            lock.parent.mkdir()
            lock.write_text(f"{by_hand.pid}\n")
            refused = box.distensor("uninstall", "--purge")
            assert refused.returncode == 69
            assert f"started by hand; end it (kill {by_hand.pid}" in refused.stderr
            assert (app / "current/bin/distensor").exists()
        finally:
            by_hand.kill()
    ends = 'case "$*" in *share/distensor) /bin/kill -9 -- "-$(ps -o pgid= -p $$ | tr -d " ")" ;; esac'
    box.script("rm", f'#!/bin/sh\n{ends}\nexec /bin/rm "$@"\n')
    assert box.run("uninstall.sh", "--purge").returncode == -9  # killed while it removed the programs
    (box.bin / "rm").unlink()
    gone = box.distensor("uninstall", "--purge")
    assert gone.returncode == 0, gone.stderr
    assert f"{books.parent} is left: these are the books of a hub" in gone.stderr
    assert box.tree() == before


def test_a_key_in_front_of_the_pipe_is_noticed(box: Box) -> None:
    """curl | bash: the script has no name then. Only its last words are run here, which need no installation."""
    text = (INSTALLERS / "linux.sh").read_text().replace('main "$@"\n', "linux_places\nsay_how_to_give_the_key\n")
    done = subprocess.run(["bash"], input=text, env=box.env, capture_output=True, text=True, check=False, timeout=20)
    assert done.returncode == 0, done.stderr
    assert "curl -fsSL ... | DISTENSOR_API_KEY=dtj_... bash" in done.stdout


def test_on_a_terminal_it_says_how_far_it_is(box: Box, tmp_path: Path) -> None:
    """`script` is the terminal. pip is a Python that waits for the second line of the progress."""
    text = (INSTALLERS / "linux.sh").read_text().replace('main "$@"\n', "")
    (tmp_path / "venv").mkdir()
    waiting = f"""{text}
APP="{tmp_path}"; NEW=venv
show_progress
while ! grep -q 's, fetching' "{tmp_path}/seen"; do sleep 0.1; done
end_progress
du() {{ printf '612\\t.\\n'; }}
show_progress
while ! grep -q 'unpacked' "{tmp_path}/seen"; do sleep 0.1; done
end_progress
! kill -0 "$PROGRESS" 2>/dev/null && echo ended
"""
    (tmp_path / "part.sh").write_text(waiting)
    words = ["script", "-qfec", f"bash {tmp_path}/part.sh", f"{tmp_path}/seen"]
    env = {**box.env, "DISTENSOR_PROGRESS_SECONDS": "1"}
    done = subprocess.run(
        words, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False, timeout=60
    )
    assert re.search(r"[1-9]\d* s, fetching", done.stdout)
    assert re.search(r"[1-9]\d* s, unpacked 612 MB of about 1100", done.stdout)
    assert done.stdout.split()[-1] == "ended"


def test_what_it_says_to_remove_by_hand_never_takes_a_hub_along(box: Box) -> None:
    """Only its last words, with a list of what stayed: the commands are run as they are printed."""
    state, settings = box.home / ".local/state/distensor", box.home / "it's mine"
    for folder in (state / "hub", state / "server", settings):
        folder.mkdir(parents=True)
    (state / "hub/hub.sqlite").write_text("books")
    (state / "installed.manifest").write_text(f"kept\t{state}\nkept\t{settings}\n")
    text = (INSTALLERS / "uninstall.sh").read_text().replace('main "$@"\n', "")
    said = subprocess.run(
        ["bash"], input=f'{text}MANIFEST="{state}/installed.manifest"\ntell_kept\n', env=box.env, capture_output=True,
        text=True, check=True, timeout=20,
    ).stdout  # fmt: skip
    commands = [line for line in said.splitlines() if line.startswith("  rm -r ")]
    assert len(commands) == 3
    assert f"not {state}/hub: the books of a hub" in said
    subprocess.run(["bash", "-e"], input="\n".join(commands), text=True, check=True, timeout=20)
    assert [path.name for path in state.iterdir()] == ["hub"]
    assert (state / "hub/hub.sqlite").read_text() == "books"
    assert not settings.exists()
