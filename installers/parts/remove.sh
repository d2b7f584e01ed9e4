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
