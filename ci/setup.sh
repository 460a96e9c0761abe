#!/bin/sh
# Makes the environment .venv. Every failure ends in one sentence that says what to do.
set -u

fail() {
    echo "setup: $1" >&2
    exit 1
}

NEEDED_MB=4000

enough() {
    "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null
}

found=""
if [ -n "${PYTHON:-}" ]; then
    enough "$PYTHON" || fail "PYTHON=$PYTHON is missing or older than 3.11; name another one."
    found=$PYTHON
else
    for candidate in python3 python3.14 python3.13 python3.12 python3.11 python; do
        if command -v "$candidate" >/dev/null 2>&1 && enough "$candidate"; then
            found=$candidate
            break
        fi
    done
fi
[ -n "$found" ] || fail "Python 3.11 or later was not found; install it, or run make with PYTHON=/path/to/python3."

"$found" -c 'import venv, ensurepip' 2>/dev/null ||
    fail "this Python has no venv module; install it (on Debian and Ubuntu: apt-get install python3-venv)."

if [ ! -x .venv/bin/python ]; then
    free=$(df -Pm . | awk 'NR == 2 { print $4 }')
    [ "$free" -ge "$NEEDED_MB" ] ||
        fail "the disk has $free MB free and the environment needs about $NEEDED_MB MB; free some space and run make again."
fi

mkdir -p build || fail "the folder build cannot be written; check the permissions and the space on the disk."
log=build/setup.log
: >"$log" || fail "build/setup.log cannot be written; check the permissions and the space on the disk."

step() {
    "$@" >>"$log" 2>&1 && return
    if grep -q "No space left on device" "$log"; then
        fail "the disk is full; free about $NEEDED_MB MB, remove .venv and run make again."
    fi
    tail -n 5 "$log" >&2
    fail "the environment could not be made, see build/setup.log; check the network and run make again."
}

echo "Making the environment in .venv (a few minutes, once) ..."
# An environment of another Python, or one that was left half made, is made anew.
if [ ! -f .venv/.complete ] || ! enough .venv/bin/python; then rm -rf .venv; fi
rm -f .venv/.complete
step "$found" -m venv .venv
step .venv/bin/python -m pip install --disable-pip-version-check -r requirements.txt -r ci/requirements.txt
step .venv/bin/python -m pip install --disable-pip-version-check --no-deps -e .
touch .venv/.complete || fail "the disk is full; free some space and run make again."
