# Sourced by the scripts beside it, after `set -euo pipefail`. Needs bash, Python 3.10+ and pip.

root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)
python=${PYTHON:-python3}

die() {
    printf '%s: %s\n' "$(basename -- "$0")" "$*" >&2
    exit 1
}

step() {
    printf '\n== %s\n' "$*"
}

# All that an environment follows from: made anew when any of it changes.
fingerprint() {
    {
        printf '%s\n' "$root" "$@"
        "$python" -c 'import sys; print(sys.version, sys.prefix)'
        cat -- "$root/pyproject.toml" "$root/constraints.txt"
    } | cksum
}

# Debian's Python comes without ensurepip: the pip outside then installs one inside.
create_env() {
    "$python" -m venv "$1" >/dev/null 2>&1 && return
    rm -rf -- "$1"
    "$python" -m venv --without-pip "$1" \
        && "$python" -m pip --python "$1/bin/python" install --quiet pip \
        && return
    rm -rf -- "$1"
    die "$python can make no virtual environment; install its venv or pip package" \
        "(on Debian and Ubuntu: apt-get install python3-venv) or set PYTHON to another Python"
}

# make_env NAME EXTRA: this package with EXTRA in the environment $root/NAME, left in $env.
# These environments belong to the scripts, which remove and remake them.
make_env() {
    local stamp want
    env=$root/$1 stamp=$root/$1/.made-from
    command -v -- "$python" >/dev/null \
        || die "no $python here; set PYTHON to a Python 3.10 or newer"
    "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' \
        || die "$python is $("$python" --version 2>&1); set PYTHON to a Python 3.10 or newer"
    want=$(fingerprint "$@")
    if [[ -f $stamp && $(<"$stamp") == "$want" ]]; then
        return
    fi
    step "making the environment $1 ($("$python" --version))"
    rm -rf -- "$env"
    create_env "$env"
    (cd -- "$root" && "$env/bin/python" -m pip install --quiet --disable-pip-version-check \
        --constraint constraints.txt --editable ".[$2]") \
        || die "pip could not install .[$2]; see above"
    printf '%s\n' "$want" >"$stamp"
}
