#!/usr/bin/env bash
# Installs disTensor on Linux: linux.sh --help
# Made by installers/assemble.sh from installers/parts.
# shellcheck disable=SC2317,SC2034  # functions are called by the name of the platform
set -euo pipefail

VERSION="0.1.0"
PLATFORM=linux

# What all scripts share: words, the list of what was made, the lock. bash 3.2 (macOS) understands all of it.

DRY=no
SYSTEM=no
PURGE=no
STEP="start"
FINISHED=no
LOCKED=no
WORK=""
MADE=""

say() { printf '%s\n' "$*"; }
warn() { printf 'distensor: %s\n' "$*" >&2; }
fail() {
    printf 'distensor: %s\n' "$*" >&2
    exit "${FAIL_CODE:-1}"
}

step() {
    STEP="$1"
    say "-- $1"
}

expect_home() {
    case "${HOME:-}" in
        /*) ;;
        *) fail "HOME is '${HOME:-}': expected the path of the home folder" ;;
    esac
}

# xdg NAME DEFAULT: the value of an XDG variable; the specification says to ignore a relative one.
xdg() {
    local value="${!1:-}"
    case "$value" in
        /*) printf '%s' "$value" ;;
        *) printf '%s' "$2" ;;
    esac
}

system_places() {
    APP=/opt/distensor
    STATE=/var/lib/private/distensor
    CONFIG=/etc/distensor
    MANIFEST=/etc/distensor/installed.manifest
    LOCK_FOLDER=/opt
    BIN=/usr/local/bin
    UNIT=/etc/systemd/system/distensor.service
}

# -- the list: KIND<TAB>PATH[<TAB>SHA256], written before the thing is made (distensor_server/service/manifest.py)

record() {
    local line
    line="$(printf '%s\t%s' "$1" "$2")"
    grep -qxF -- "$line" "$MANIFEST" 2>/dev/null || printf '%s\n' "$line" >>"$MANIFEST" ||
        fail "$MANIFEST cannot be written; is the disk full or read-only?"
}

# missing_folders PATH: PATH and the folders above it that are not there, the outermost first.
missing_folders() {
    local path="$1" list=""
    while [ ! -d "$path" ]; do
        list="$path
$list"
        path="$(dirname "$path")"
    done
    printf '%s' "$list"
}

# open_list: the folder of the list and its first lines.
open_list() {
    local folder made
    folder="$(dirname "$MANIFEST")"
    made="$(missing_folders "$folder")"
    MADE="$made"
    mkdir -p "$folder" || fail "$folder cannot be made; is the disk full or read-only?"
    touch "$MANIFEST" || fail "$MANIFEST cannot be written; is the disk full or read-only?"
    printf '%s\n' "$made" | while IFS= read -r path; do
        [ -z "$path" ] || [ "$path" = "$STATE" ] || [ "$path" = "$CONFIG" ] || record dir "$path"
    done
}

# unmake: the folders of the list itself, which a full disk may have kept out of it.
unmake() {
    printf '%s\n' "$MADE" | awk '{ line[NR] = $0 } END { for (i = NR; i > 0; i--) print line[i] }' |
        while IFS= read -r path; do
            [ -z "$path" ] || rmdir "$path" 2>/dev/null || true
        done
}

# make_folder PATH: with a line for each folder that was not there.
make_folder() {
    local made
    made="$(missing_folders "$1")"
    printf '%s\n' "$made" | while IFS= read -r path; do
        [ -z "$path" ] || record dir "$path"
    done
    mkdir -p "$1" || fail "$1 cannot be made; is the disk full or read-only?"
}

# -- one at a time: the kernel frees the lock of a script that was killed. macOS has no command flock, Python has one.
# The lock lies on a folder that is always there, so that nothing has to be made for it. A file system without locks
# (some network homes) is no reason to refuse.

LOCK_CODE='
import fcntl, sys
try:
    fcntl.flock(9, fcntl.LOCK_EX | fcntl.LOCK_NB)
except BlockingIOError:
    sys.exit(75)
except OSError:
    pass
'

take_lock() {
    local python="$1" folder="$2" code=0
    exec 9<"$folder"
    "$python" -c "$LOCK_CODE" || code=$?
    [ "$code" != 75 ] || FAIL_CODE=75 fail "another installation runs at this moment; try again when it has ended"
    LOCKED=yes
}

sha256_of() {
    if command -v sha256sum >/dev/null 2>&1; then
        sha256sum <"$1" | cut -d ' ' -f 1
    else
        shasum -a 256 <"$1" | cut -d ' ' -f 1
    fi
}

# Linux: places, Python, systemd.

linux_places() {
    if [ "$SYSTEM" = yes ]; then
        system_places
        return
    fi
    expect_home
    APP="$(xdg XDG_DATA_HOME "$HOME/.local/share")/distensor"
    STATE="$(xdg XDG_STATE_HOME "$HOME/.local/state")/distensor"
    CONFIG="$(xdg XDG_CONFIG_HOME "$HOME/.config")/distensor"
    MANIFEST="$STATE/installed.manifest"
    LOCK_FOLDER="$HOME"
    BIN="$HOME/.local/bin"
    UNIT="$(linux_unit_folder)/distensor.service"
}

# systemd looks for units by its own XDG_CONFIG_HOME, not by that of the shell (distensor_server/service/layout.py).
linux_unit_folder() {
    local folder=""
    if [ -n "${XDG_CONFIG_HOME:-}" ]; then
        folder="$(systemctl --user show-environment 2>/dev/null | sed -n 's|^XDG_CONFIG_HOME=/|/|p')" || true
    fi
    printf '%s/systemd/user' "${folder:-$HOME/.config}"
}

linux_check() {
    [ "$(uname -s)" = Linux ] || fail "this is $(uname -s), not Linux; use macos.sh on a Mac"
    if [ "$SYSTEM" = yes ]; then
        [ "$(id -u)" = 0 ] || fail "--system needs root; leave it out to install for yourself"
        linux_manager || [ "$SERVICE" = no ] || fail "--system needs systemd, which does not answer here; leave it out"
    elif [ -n "${SUDO_USER:-}" ] && [ "$(id -u)" = 0 ]; then
        fail "run it without sudo to install for yourself ($SUDO_USER), or with --system for the whole machine"
    fi
}

linux_pythons() {
    printf '%s\n' python3.13 python3.12 python3.11 python3.14 python3
}

linux_python_hint() {
    local id
    # ID and ID_LIKE name the distribution and its relatives.
    id="$(sed -n -e 's/^ID=//p' -e 's/^ID_LIKE=//p' /etc/os-release 2>/dev/null | tr '"\n' '  ')" || true
    case " $id " in
        *" debian "* | *" ubuntu "*) say "sudo apt install python3 python3-venv" ;;
        *" fedora "* | *" rhel "*) say "sudo dnf install python3.12" ;;
        *" arch "*) say "sudo pacman -S python" ;;
        *" suse "* | *" opensuse "*) say "sudo zypper install python312" ;;
        *) say "install Python 3.11 or newer with your package manager" ;;
    esac
}

linux_systemctl() {
    if [ "$SYSTEM" = yes ]; then
        systemctl "$@"
    else
        systemctl --user "$@"
    fi
}

linux_manager() {
    linux_systemctl show --property=Version >/dev/null 2>&1
}

# What `distensor service uninstall` does, for an installation whose Python is gone.
linux_stop_service() {
    if linux_manager; then
        linux_systemctl disable --now distensor.service || warn "systemd did not stop distensor.service"
    fi
}

linux_forget_service() {
    linux_systemctl daemon-reload >/dev/null 2>&1 || true
}

linux_after() {
    # systemd has one file for each user who asked for it; root's services stay anyway.
    [ "$(id -u)" != 0 ] || return 0
    [ ! -e "/var/lib/systemd/linger/$(id -un)" ] || return 0
    if [ "$SYSTEM" = no ] && linux_manager && command -v loginctl >/dev/null 2>&1; then
        say "It runs while you are logged in; to keep it running after that: loginctl enable-linger"
    fi
}

# Uninstalling: the service first, then the list backwards. Also for what was installed half or whose Python is gone.

# ours PATH: whether it is one of our folders or lies in one; nothing else is ever removed with all that is in it.
ours() {
    case "$1" in
        */distensor | */distensor/*) return 0 ;;
        *) return 1 ;;
    esac
}

program_works() {
    "$APP/current/bin/distensor-server" --version >/dev/null 2>&1
}

scope() {
    [ "$SYSTEM" = no ] || printf '%s' --system
}

stop_service() {
    [ -e "$UNIT" ] || return 0
    grep -q "distensor service install" "$UNIT" || {
        warn "$UNIT was not written by disTensor and is left alone"
        return 0
    }
    # shellcheck disable=SC2046  # no word or one
    if program_works && "$APP/current/bin/distensor" service uninstall $(scope) 9>&-; then
        return 0
    fi
    "${PLATFORM}_stop_service"
    rm -f "$UNIT"
    "${PLATFORM}_forget_service"
    say "stopped, and removed $UNIT"
}

# The key is a secret and goes in any case; a key in the keyring is known only to the program.
forget_key() {
    if [ "$SYSTEM" = no ] && program_works; then
        "$APP/current/bin/distensor" auth logout >/dev/null 2>&1 9>&- || true
    fi
    rm -f "$CONFIG/api_key" "$CONFIG/api_key.in-keyring" "$CONFIG/key"
}

remove_line() {
    local kind="$1" path="$2" sum="$3"
    case "$kind" in
        dir) [ ! -d "$path" ] || rmdir "$path" 2>/dev/null || printf '%s\t%s\n' "$kind" "$path" ;;
        tree) ! ours "$path" || [ ! -e "$path" ] || rm -rf "$path" ;;
        link) remove_link "$path" ;;
        file) remove_file "$path" "$sum" ;;
        kept) remove_kept "$path" ;;
    esac
}

remove_link() {
    [ -L "$1" ] || return 0
    case "$(readlink "$1")" in
        "$APP"/*) rm -f "$1" ;;
        *) warn "$1 points elsewhere by now and is left alone" ;;
    esac
}

remove_file() {
    [ -f "$1" ] || return 0
    if [ "$(sha256_of "$1")" = "$2" ]; then
        rm -f "$1"
    else
        warn "$1 was changed since and is left alone"
    fi
}

# empty_out FOLDER: all but the books and the authority of a hub that runs here, too: they are not the supervisor's.
empty_out() {
    if [ ! -d "$1/hub" ]; then
        rm -rf "$1"
        return
    fi
    find "$1" -mindepth 1 -maxdepth 1 ! -name hub -exec rm -rf {} +
    warn "$1/hub is left: these are the books of a hub, which all its nodes need (rm -r $1/hub if nobody does)"
}

remove_kept() {
    [ -d "$1" ] || return 0
    if [ "$PURGE" = yes ] && ours "$1"; then
        empty_out "$1"
    elif ! rmdir "$1" 2>/dev/null; then
        printf 'kept\t%s\n' "$1"
    fi
}

# A supervisor that was started by hand belongs to no service: its programs are not taken away under it.
refuse_while_one_runs() {
    local pid folder="$STATE/server"
    [ "$SYSTEM" = no ] || folder="$STATE"
    pid="$(cat "$folder/lock" 2>/dev/null)" || return 0
    [ -n "$pid" ] && ps -o args= -p "$pid" 2>/dev/null | grep -qF -- "$APP/" || return 0
    fail "a supervisor still runs that was started by hand; end it (kill $pid, it finishes its round first), then try again"
}

# walk_list LINES: remove backwards; prints the lines of what stays.
walk_list() {
    local kind path sum
    printf '%s\n' "$1" | awk '{ line[NR] = $0 } END { for (i = NR; i > 0; i--) print line[i] }' |
        while IFS="$(printf '\t')" read -r kind path sum; do
            case "$path" in
                /*) remove_line "$kind" "$path" "$sum" ;;
            esac
        done
}

show_list() {
    local kind path _
    printf '%s\n' "$1" | while IFS="$(printf '\t')" read -r kind path _; do
        case "$kind" in
            dir) say "would remove $path (if it is empty then)" ;;
            kept)
                if [ "$PURGE" = yes ]; then
                    say "would remove $path"
                else
                    say "would keep $path (--purge removes it)"
                fi
                ;;
            tree | link | file) say "would remove $path" ;;
        esac
    done
}

# take_away: everything of the list; what stays is written to the list again, in its old order.
take_away() {
    local lines left made
    lines="$(cat "$MANIFEST" 2>/dev/null)" || true
    if [ -z "$lines" ]; then
        rm -f "$MANIFEST"
        rmdir "$STATE" 2>/dev/null || true
        return 0
    fi
    # The programs first, with the list still there: that takes a while, and whoever ends it may begin again.
    walk_list "$(printf '%s\n' "$lines" | awk -F '\t' '$1 == "tree"')"
    rm -f "$MANIFEST"
    left="$(walk_list "$lines")"
    # Folders that others use by now are theirs; only for what is kept there will be a next time.
    if printf '%s\n' "$left" | grep -q '^kept'; then
        made="$(missing_folders "$(dirname "$MANIFEST")")"
        mkdir -p "$(dirname "$MANIFEST")"
        {
            printf '%s\n' "$made" | sed -e '/^$/d' -e "s/^/dir$(printf '\t')/"
            printf '%s\n' "$left" | awk '{ line[NR] = $0 } END { for (i = NR; i > 0; i--) print line[i] }'
        } >"$MANIFEST"
    fi
}

# tell_kept: the commands that remove what stayed; never one that takes the books of a hub with it.
tell_kept() {
    local path one
    awk -F '\t' '$1 == "kept" { print $2 }' "$MANIFEST" | while IFS= read -r path; do
        if [ ! -d "$path/hub" ]; then
            say "  rm -r $(quoted "$path")"
            continue
        fi
        find "$path" -mindepth 1 -maxdepth 1 ! -name hub | sort | while IFS= read -r one; do
            say "  rm -r $(quoted "$one")"
        done
        say "  (not $path/hub: the books of a hub)"
    done
}

quoted() {
    printf "'%s'" "$(printf '%s' "$1" | sed "s/'/'\\\\''/g")"
}

uninstall() {
    if [ ! -e "$MANIFEST" ]; then
        say "disTensor is not installed here (there is no $MANIFEST)"
        return 0
    fi
    if [ "$DRY" = yes ]; then
        [ ! -e "$UNIT" ] || say "would stop the service and remove $UNIT"
        say "would remove the key"
        show_list "$(cat "$MANIFEST")"
        return 0
    fi
    stop_service
    refuse_while_one_runs
    say "removing the programs, which may take a minute"
    forget_key
    take_away
    if [ -e "$MANIFEST" ]; then
        say "Removed. Kept, because it is yours (identity, receipts, settings); this removes it, too:"
        tell_kept
    else
        say "Removed; nothing is left."
    fi
}

# Installing and updating. Each installation is an environment of its own; `current` points to the one in use, so an
# update that fails goes back by pointing there again.

SERVICE=yes
KEY=""
PYTHON=""
OLD=""
NEW=""
SWITCHED=no
KEY_REFUSED=no
ASKED=no
PROGRESS=""

find_python() {
    local name tried="" bare=""
    for name in ${DISTENSOR_PYTHON:+"$DISTENSOR_PYTHON"} $("${PLATFORM}_pythons"); do
        command -v "$name" >/dev/null 2>&1 || continue
        if "$name" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then
            if "$name" -c 'import venv, ensurepip' >/dev/null 2>&1; then
                PYTHON="$(command -v "$name")"
                say "Python: $PYTHON"
                return
            fi
            bare="$name"
        else
            tried="$tried $name"
        fi
    done
    [ -z "$bare" ] || fail "$bare cannot make virtual environments; this adds it: $("${PLATFORM}_python_hint")"
    [ -z "$tried" ] || warn "too old:$tried"
    fail "Python 3.11 or newer was not found; this installs it: $("${PLATFORM}_python_hint")"
}

# wheel NAME: the file that SHA256SUMS names for a distribution of this version.
wheel() {
    local found
    found="$(awk -v start="$1-$VERSION-" 'index($2, start) == 1 { print $2 }' "$WORK/SHA256SUMS")"
    case "$found" in
        "") fail "$DISTENSOR_WHEELS/SHA256SUMS names no wheel of $1 $VERSION, which this installer belongs to" ;;
        *[!A-Za-z0-9._+-]*) fail "$DISTENSOR_WHEELS/SHA256SUMS names more than one wheel of $1 $VERSION, or a strange one: $found" ;;
    esac
    printf '%s' "$found"
}

# copy FROM TO: with the folder that may be full.
copy() {
    cp "$1" "$2" || fail "$1 cannot be copied to $(dirname "$2"); is the disk full or read-only?"
}

# verified NAME: copy it, then compare the copy's sum, so that what was compared is what is installed.
verified() {
    local wanted is
    [ -r "$DISTENSOR_WHEELS/$1" ] || fail "$DISTENSOR_WHEELS/$1 cannot be read"
    copy "$DISTENSOR_WHEELS/$1" "$WORK/$1"
    wanted="$(awk -v name="$1" '$2 == name { print $1 }' "$WORK/SHA256SUMS")"
    is="$(sha256_of "$WORK/$1")"
    [ "$is" = "$wanted" ] || fail "$1 is not the file it should be: sha256 $is, expected $wanted"
}

check_wheels() {
    [ -n "${DISTENSOR_WHEELS:-}" ] || fail "there is no public place to download from yet; build the wheels from the \
source (make wheels) and name their folder: DISTENSOR_WHEELS=/path/to/dist"
    [ -f "$DISTENSOR_WHEELS/SHA256SUMS" ] || fail "$DISTENSOR_WHEELS/SHA256SUMS is not there; make wheels writes it"
    copy "$DISTENSOR_WHEELS/SHA256SUMS" "$WORK/SHA256SUMS"
    LIBRARY="$(wheel distensor)"
    SUPERVISOR="$(wheel distensor_server)"
    DASHBOARD="$(wheel distensor_tui)"
    verified "$LIBRARY"
    verified "$SUPERVISOR"
    verified "$DASHBOARD"
    CONSTRAINTS=""
    if grep -q ' constraints.txt$' "$WORK/SHA256SUMS"; then
        verified constraints.txt
        CONSTRAINTS="$WORK/constraints.txt"
    fi
    say "three wheels of $VERSION, sums as expected"
}

# take_key: out of the environment at once, so that nothing started from here inherits it.
take_key() {
    set +x
    KEY="${DISTENSOR_API_KEY:-${DISTENSOR_JOIN_TOKEN:-}}"
    unset DISTENSOR_API_KEY DISTENSOR_JOIN_TOKEN
}

has_key() {
    [ -n "$KEY" ] || [ -e "$CONFIG/api_key" ] || [ -e "$CONFIG/api_key.in-keyring" ] || [ -e "$CONFIG/key" ] ||
        [ -e "$STATE/server/credential.json" ] || [ -e "$STATE/credential.json" ]
}

# `DISTENSOR_API_KEY=... curl ... | bash` gives the variable to curl alone: ask, or say how it is written.
ask_key() {
    has_key && return
    if [ "$DRY" = no ] && (exec </dev/tty) 2>/dev/null; then
        ASKED=yes
        printf 'Key of this machine (dtj_..., not shown; Enter to give it later): ' >/dev/tty
        IFS= read -r -s KEY </dev/tty || KEY=""
        printf '\n' >/dev/tty
    fi
}

# Who was asked knows that there is none. A script out of a pipe has no name of its own.
say_how_to_give_the_key() {
    say "There is no key yet, so it waits and earns nothing. Give it the key (the dashboard asks for it, too):"
    say "  $(as_root)$BIN/distensor auth login$(scope_option)"
    if [ "$ASKED" = no ] && [ ! -f "$0" ]; then
        say "In front of a pipe only the first command gets a variable. Next time give it to bash:"
        say "  curl -fsSL ... | DISTENSOR_API_KEY=dtj_... bash"
    fi
}

scope_option() {
    [ "$SYSTEM" = no ] || printf ' --system'
}

as_root() {
    [ "$SYSTEM" = no ] || printf 'sudo '
}

prepare() {
    open_list
    make_folder "$(dirname "$APP")"
    [ "$SYSTEM" = yes ] || make_folder "$(dirname "$CONFIG")"
    record kept "$STATE"
    record kept "$CONFIG"
    record tree "$APP"
    mkdir -p "$APP" || fail "$APP cannot be made; is the disk full or read-only?"
    if [ "$SYSTEM" = yes ]; then
        # systemd makes the state directory itself, for the user that it invents, and this link to it.
        record kept /var/lib/distensor
    else
        [ -d "$CONFIG" ] || mkdir -m 700 "$CONFIG"
    fi
    [ ! -L "$APP/current" ] || OLD="$(readlink "$APP/current")"
    local leftover
    for leftover in "$APP"/venv.*; do
        # What an interrupted run left.
        [ ! -d "$leftover" ] || [ "$(basename "$leftover")" = "$OLD" ] || rm -rf "$leftover"
    done
}

up_to_date() {
    [ -n "$OLD" ] && cmp -s "$WORK/SHA256SUMS" "$APP/$OLD/SHA256SUMS" && answers_version "$APP/$OLD"
}

# explain LOG LINES: its end, and the cause in words where it is one that a person can repair.
explain() {
    tail -n "$2" "$1" >&2
    if grep -qi 'no space left on device' "$1"; then
        fail "the disk of $APP is full; PyTorch needs about 1.5 GB there (several for CUDA)"
    fi
}

make_environment() {
    local folder
    folder="$(mktemp -d "$APP/venv.XXXXXX")" || fail "$APP cannot be written; is the disk full or read-only?"
    NEW="$(basename "$folder")"
    [ "$SYSTEM" = no ] || chmod 755 "$folder"
    "$PYTHON" -m venv "$folder" >"$WORK/venv.log" 2>&1 || {
        explain "$WORK/venv.log" 5
        fail "$PYTHON could not make a virtual environment; this may help: $("${PLATFORM}_python_hint")"
    }
}

# Minutes without a word look like a fault: on a terminal, how long it takes and how much is there by now. pip fetches
# everything before it unpacks anything.
show_progress() {
    local began=$SECONDS size
    [ -t 1 ] || return 0
    while sleep "${DISTENSOR_PROGRESS_SECONDS:-10}" && kill -0 "$$" 2>/dev/null; do
        size="$(du -sm "$APP/$NEW" 2>/dev/null | cut -f 1)" || size=0
        if [ "${size:-0}" -lt 100 ]; then
            say "   $((SECONDS - began)) s, fetching"
        else
            say "   $((SECONDS - began)) s, unpacked $size MB of about 1100"
        fi
    done 9>&- &
    PROGRESS=$!
}

end_progress() {
    [ -n "$PROGRESS" ] || return 0
    kill "$PROGRESS" 2>/dev/null || true
    wait "$PROGRESS" 2>/dev/null || true
    PROGRESS=""
}

install_wheels() {
    show_progress
    # DISTENSOR_PIP_ARGS: more options for pip, in words: another index, or --no-index --find-links /media/usb
    # shellcheck disable=SC2086  # words
    "$APP/$NEW/bin/python" -m pip install --quiet --disable-pip-version-check --no-input \
        ${CONSTRAINTS:+-c "$CONSTRAINTS"} ${DISTENSOR_PIP_ARGS:-} \
        "$WORK/$LIBRARY" "$WORK/$SUPERVISOR" "$WORK/$DASHBOARD" >"$WORK/pip.log" 2>&1 || {
        explain "$WORK/pip.log" 15
        fail "pip could not install the wheels"
    }
    end_progress
}

answers_version() {
    [ "$("$1/bin/distensor" --version 2>/dev/null)" = "distensor $VERSION" ] &&
        [ "$("$1/bin/distensor-server" --version 2>/dev/null)" = "distensor-server $VERSION" ]
}

check_environment() {
    answers_version "$APP/$NEW" || fail "what was installed does not run: $APP/$NEW/bin/distensor-server --version"
    copy "$WORK/SHA256SUMS" "$APP/$NEW/SHA256SUMS"
}

# point_to NAME: rename(2) over the old link; mv would go into the folder that it points to.
point_to() {
    ln -sfn "$1" "$APP/current.new"
    "$PYTHON" -c 'import os, sys; os.replace(*sys.argv[1:])' "$APP/current.new" "$APP/current"
}

switch() {
    SWITCHED=yes
    point_to "$NEW"
}

make_links() {
    local name
    make_folder "$BIN"
    for name in distensor distensor-server; do
        if [ -e "$BIN/$name" ] && [ "$(readlink "$BIN/$name" 2>/dev/null)" != "$APP/current/bin/$name" ]; then
            fail "$BIN/$name is there already and was not made by this installer; move it away, then try again"
        fi
        record link "$BIN/$name"
        ln -sfn "$APP/current/bin/$name" "$BIN/$name"
    done
}

keep_key() {
    local said code=0
    [ -n "$KEY" ] || return 0
    # shellcheck disable=SC2046  # no word or one
    said="$(printf '%s\n' "$KEY" | "$APP/current/bin/distensor" auth login --stdin $(scope) 2>&1 9>&-)" || code=$?
    if [ "$code" = 69 ]; then
        warn "the hub does not answer now; the key is kept without having been tried"
        code=0
        # shellcheck disable=SC2046  # no word or one
        said="$(printf '%s\n' "$KEY" | "$APP/current/bin/distensor" auth login --stdin --no-test $(scope) 2>&1 9>&-)" ||
            code=$?
    fi
    say "$said"
    [ "$code" = 0 ] || KEY_REFUSED=yes
}

# runs_from FOLDER: whether the supervisor of this installation was started from there.
runs_from() {
    local pid folder="$STATE/server"
    [ "$SYSTEM" = no ] || folder="$STATE"
    pid="$(cat "$folder/lock" 2>/dev/null)" || return 1
    [ -n "$pid" ] && ps -o args= -p "$pid" 2>/dev/null | grep -qF -- "$1/"
}

# The same wheels again are no reason to end the work that runs.
start_service() {
    local keep=""
    if [ -z "$NEW" ] && runs_from "$APP/$OLD"; then
        keep=--keep-running
    elif [ -n "$OLD" ] && [ -e "$UNIT" ]; then
        say "running work has up to two minutes to finish its round"
    fi
    # shellcheck disable=SC2046  # no word or one
    "$APP/current/bin/distensor" service install $keep $(scope) 9>&- || fail "the service does not start"
}

# Success is said only after the supervisor itself has answered.
check_health() {
    local looks=0 socket=""
    [ "$SYSTEM" = no ] || socket=/run/distensor/supervisor.sock
    until "$APP/current/bin/distensor" status ${socket:+--socket "$socket"} >"$WORK/status" 2>&1 9>&-; do
        looks=$((looks + 1))
        if [ "$looks" -ge "${DISTENSOR_HEALTH_LOOKS:-60}" ]; then
            tail -n 3 "$WORK/status" >&2
            fail "the service was started, but the supervisor does not answer"
        fi
        sleep 0.5
    done
}

# undo: after any failure. An update goes back to what ran before; of a first installation nothing is left.
undo() {
    set +e
    if [ -n "$OLD" ] && [ "$SWITCHED" = yes ]; then
        point_to "$OLD"
        # shellcheck disable=SC2046  # no word or one
        [ ! -e "$UNIT" ] || "$APP/current/bin/distensor" service install $(scope) >/dev/null 2>&1 9>&-
        warn "went back to the version that was there before"
    fi
    if [ -z "$OLD" ]; then
        stop_service >/dev/null 2>&1
        [ -z "$KEY" ] || forget_key
        PURGE=no
        take_away
        unmake
        warn "nothing of this attempt is left; it can be tried again"
    elif [ -n "$NEW" ]; then
        rm -rf "${APP:?}/$NEW"
    fi
}

on_exit() {
    local code=$?
    end_progress
    if [ "$FINISHED" = no ] && [ "$code" != 0 ]; then
        warn "stopped at: $STEP"
        [ "$LOCKED" = no ] || undo
    fi
    [ -z "$WORK" ] || rm -rf "$WORK"
    exit "$code"
}

plan() {
    say "would make an environment in $APP with $PYTHON and install into it:"
    say "  $LIBRARY $SUPERVISOR $DASHBOARD, and what they need (PyTorch: about 1 GB, several for CUDA)"
    say "would point $APP/current to it after both programs have answered"
    say "would link $BIN/distensor and $BIN/distensor-server"
    [ -z "$KEY" ] || say "would keep the key with distensor auth login"
    [ "$SERVICE" = no ] || say "would write $UNIT, start it, and wait until the supervisor answers"
    say "would list all this in $MANIFEST"
}

install() {
    trap on_exit EXIT
    trap 'exit 130' INT
    trap 'exit 143' TERM HUP
    step "machine"
    "${PLATFORM}_check"
    step "python"
    find_python
    WORK="$(mktemp -d "${TMPDIR:-/tmp}/distensor.XXXXXXXX")"
    step "wheels"
    check_wheels
    ask_key
    if [ "$DRY" = yes ]; then
        plan
        FINISHED=yes
        return
    fi
    step "folders"
    take_lock "$PYTHON" "$LOCK_FOLDER"
    prepare
    if up_to_date; then
        say "these wheels are installed already"
        NEW=""
    else
        step "environment"
        make_environment
        step "packages (PyTorch is large: minutes)"
        install_wheels
        step "try the programs"
        check_environment
        step "switch"
        switch
    fi
    step "links"
    make_links
    step "key"
    keep_key
    run_service
    FINISHED=yes
    remove_old
    farewell
}

# A supervisor that was started by hand still runs from the old environment; then the next update removes it.
remove_old() {
    [ -n "$OLD" ] && [ -n "$NEW" ] || return 0
    if [ "$SERVICE" = yes ]; then
        step "remove the version before"
        rm -rf "${APP:?}/$OLD"
    else
        say "A supervisor that runs now is still the old version: stop it and start it again."
    fi
}

run_service() {
    if [ "$SERVICE" = no ]; then
        return
    elif ! "${PLATFORM}_manager"; then
        SERVICE=none
        return
    fi
    step "service"
    start_service
    step "health"
    check_health
}

farewell() {
    say ""
    case "$SERVICE" in
        yes) say "disTensor $VERSION is installed and its supervisor answers." ;;
        no) say "disTensor $VERSION is installed, without a service. Start it: $BIN/distensor-server run" ;;
        none) say "disTensor $VERSION is installed. No service manager answers here, so start it: $BIN/distensor-server run" ;;
    esac
    say "Look at it: $(as_root)distensor"
    case ":${PATH:-}:" in
        *":$BIN:"*) ;;
        *)
            say "This shell does not find it yet. Now, and in ~/.bashrc or ~/.zshrc for later ones:"
            say "  export PATH=\"$BIN:\$PATH\""
            ;;
    esac
    [ "$SERVICE" = no ] || "${PLATFORM}_after"
    has_key || say_how_to_give_the_key
    if [ "$KEY_REFUSED" = yes ]; then
        warn "the key was refused, as said above; give another one: $(as_root)$BIN/distensor auth login$(scope_option)"
        exit 77
    fi
}

usage() {
    cat <<EOF
Installs disTensor $VERSION for one person, into the home folder; run again, it updates and keeps all settings.

  --dry-run      print what would be done, change nothing
  --no-service   do not start the supervisor in the background
  --uninstall    remove what was installed; with --purge also identity, receipts, settings and logs
  --system       for the whole machine instead (Linux with systemd, root)
  --version      print the version

DISTENSOR_WHEELS     the folder with the wheels and their SHA256SUMS (make wheels)
DISTENSOR_API_KEY    the key of this machine, dtj_...; write it behind the pipe: curl ... | DISTENSOR_API_KEY=... bash
DISTENSOR_PYTHON     a Python that is not on PATH
DISTENSOR_PIP_ARGS   more options for pip, for example: --no-index --find-links /media/usb
EOF
}

main() {
    local remove=no
    umask 022
    take_key
    while [ $# -gt 0 ]; do
        case "$1" in
            --dry-run) DRY=yes ;;
            --no-service) SERVICE=no ;;
            --system) SYSTEM=yes ;;
            --uninstall) remove=yes ;;
            --purge) PURGE=yes ;;
            --version) say "distensor installer $VERSION" && exit 0 ;;
            --help | -h) usage && exit 0 ;;
            *) FAIL_CODE=64 fail "unknown option '$1'; --help lists them" ;;
        esac
        shift
    done
    "${PLATFORM}_places"
    if [ "$remove" = yes ]; then
        uninstall
    elif [ "$PURGE" = yes ]; then
        FAIL_CODE=64 fail "--purge goes with --uninstall"
    else
        install
    fi
    exit 0
}

main "$@"
