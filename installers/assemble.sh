#!/usr/bin/env bash
# Put the parts together: each of the three scripts has to work alone, since `curl ... | bash` fetches only one.
# The uninstaller also travels in the wheel of the supervisor, for `distensor uninstall`.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
target="${1:-.}"
version="$(sed -n 's/^version = "\(.*\)"/\1/p' ../pyproject.toml | head -n 1)"

script() {
    local out="$1" about="$2" platform="$3" part
    shift 3
    {
        printf '#!/usr/bin/env bash\n# %s\n# Made by installers/assemble.sh from installers/parts.\n' "$about"
        printf '# shellcheck disable=SC2317,SC2034  # functions are called by the name of the platform\n'
        printf 'set -euo pipefail\n\nVERSION="%s"\nPLATFORM=%s\n' "$version" "$platform"
        for part in "$@"; do
            printf '\n'
            cat "parts/$part.sh"
        done
    } >"$out"
    chmod 755 "$out"
}

mkdir -p "$target"
script "$target/linux.sh" "Installs disTensor on Linux: linux.sh --help" linux common linux remove install main_install
script "$target/macos.sh" "Installs disTensor on macOS: macos.sh --help" macos common macos remove install main_install
script "$target/uninstall.sh" "Removes disTensor: uninstall.sh --help" '""' common linux macos remove main_uninstall
