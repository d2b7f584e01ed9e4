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
