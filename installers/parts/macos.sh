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
