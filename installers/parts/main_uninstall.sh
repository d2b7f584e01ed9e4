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
