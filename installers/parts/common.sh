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
