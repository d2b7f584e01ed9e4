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
