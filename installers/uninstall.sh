#!/usr/bin/env bash
# Removes disTensor: uninstall.sh --help
# Made by installers/assemble.sh from installers/parts.
# shellcheck disable=SC2317,SC2034  # functions are called by the name of the platform
set -euo pipefail

VERSION="0.1.0"
PLATFORM=""

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

# macOS: places, Python, launchd. Not run on a Mac yet; tested with recorded answers of its commands.

LABEL=org.distensor.server

macos_places() {
    [ "$SYSTEM" = no ] || fail "--system: on macOS disTensor runs as an agent of the user; leave --system out"
    expect_home
    STATE="$HOME/Library/Application Support/distensor"
    CONFIG="$STATE"
    APP="$STATE/app"
    MANIFEST="$STATE/installed.manifest"
    LOCK_FOLDER="$HOME"
    BIN="$HOME/.local/bin"
    UNIT="$HOME/Library/LaunchAgents/$LABEL.plist"
}

macos_check() {
    [ "$(uname -s)" = Darwin ] || fail "this is $(uname -s), not macOS; use linux.sh on Linux"
    [ "$(id -u)" != 0 ] || [ -z "${SUDO_USER:-}" ] || fail "run it without sudo: it installs for you alone"
    say "macOS $(sw_vers -productVersion), $(uname -m)"
    [ "$(uname -m)" = arm64 ] || fail "PyTorch has no build for Macs with Intel processors any more"
}

# Never /usr/bin/python3: without the developer tools it opens a window instead of running.
macos_pythons() {
    local version folder
    for version in 3.13 3.12 3.11 3.14; do
        printf 'python%s\n' "$version"
        for folder in /opt/homebrew/bin /usr/local/bin "/Library/Frameworks/Python.framework/Versions/$version/bin"; do
            printf '%s/python%s\n' "$folder" "$version"
        done
    done
}

macos_python_hint() {
    if command -v brew >/dev/null 2>&1; then
        say "brew install python@3.12"
    else
        say "install Python 3.12 from https://www.python.org/downloads/macos/"
    fi
}

macos_manager() {
    launchctl version >/dev/null 2>&1
}

# What `distensor service uninstall` does, for an installation whose Python is gone. bootout answers before the agent
# has ended, and one whose files are removed under it would be restarted for ever.
macos_stop_service() {
    local domain looks
    for domain in "gui/$(id -u)" "user/$(id -u)"; do
        launchctl print "$domain/$LABEL" >/dev/null 2>&1 || continue
        launchctl bootout "$domain/$LABEL" >/dev/null 2>&1 || true
        looks=0
        while launchctl print "$domain/$LABEL" >/dev/null 2>&1; do
            looks=$((looks + 1))
            [ "$looks" -lt 260 ] || fail "$domain/$LABEL does not end; launchctl kill KILL $domain/$LABEL ends it"
            sleep 0.5
        done
    done
}

macos_forget_service() { :; }

macos_after() { :; }

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

usage() {
    cat <<EOF
Removes disTensor: service, programs, links and the key. Identity, receipts and settings stay.

  --purge        those, too
  --dry-run      list what would be removed, change nothing
  --system       the installation of the whole machine (Linux, root)
  --version      print the version
EOF
}

main() {
    umask 022
    while [ $# -gt 0 ]; do
        case "$1" in
            --dry-run) DRY=yes ;;
            --system) SYSTEM=yes ;;
            --purge) PURGE=yes ;;
            --version) say "distensor uninstaller $VERSION" && exit 0 ;;
            --help | -h) usage && exit 0 ;;
            *) FAIL_CODE=64 fail "unknown option '$1'; --help lists them" ;;
        esac
        shift
    done
    case "$(uname -s)" in
        Linux) PLATFORM=linux ;;
        Darwin) PLATFORM=macos ;;
        *) fail "this is $(uname -s): disTensor installs on Linux and macOS only" ;;
    esac
    "${PLATFORM}_places"
    [ "$SYSTEM" = no ] || [ "$(id -u)" = 0 ] || fail "--system needs root"
    uninstall
    exit 0
}

main "$@"
